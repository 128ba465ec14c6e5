// A picture over time that is drawn anew for every part of it that one looks at: zoomed by keys, buttons and ctrl + wheel, moved by dragging.
// Times are ticks, tenths of a microsecond.

const TICK = 1e-7;

// Steps of 1, 2 and 5 that leave room for what is written there.
function axisStep(span, room) {
  const rough = span / Math.max(2, room), power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= rough);
}

// `draw(axis, add)` draws what lies between axis.low and axis.high; `keys` are what the arrows do, `drawn` is called after each drawing.
function timeline({ label, from, to, height, draw, keys = {}, left = 104 }) {
  let low = from, high = to;
  const picture = svg("svg", { class: "timeline", tabindex: 0, role: "application", "aria-label": label });
  const axis = () => {
    const width = picture.clientWidth || 900, start = width < 560 ? 62 : left, end = width - 10;
    return { low, high, width, start, end, x: (time) => start + ((time - low) / (high - low)) * (end - start), time: (x) => low + ((x - start) / (end - start)) * (high - low) };
  };

  function redraw() {
    const now = axis(), tall = height();
    picture.setAttribute("height", tall);
    picture.setAttribute("viewBox", `0 0 ${now.width} ${tall}`);
    const step = axisStep(high - low, (now.end - now.start) / 90), marks = [];
    for (let time = Math.ceil(low / step) * step; time <= high; time += step) {
      const x = now.x(time);
      marks.push(svg("line", { class: "grid", x1: x, x2: x, y1: 18, y2: tall }), svg("text", { class: "axis", x: x + 3, y: 12 }, x > now.end - 44 ? "" : time ? seconds(time * TICK) : "0"));
    }
    put(picture, ...marks, ...draw(now));
  }

  function look(begin, end) {
    const span = Math.min(to - from, Math.max(20, end - begin));
    low = Math.max(from, Math.min(begin, to - span));
    high = low + span;
    redraw();
  }

  function zoom(factor, at = (low + high) / 2) {
    look(at - (at - low) / factor, at + (high - at) / factor);
  }

  let grabbed = null;
  picture.addEventListener("pointerdown", (event) => {
    if (event.pointerType !== "touch") grabbed = { x: event.clientX, low, high };
  });
  addEventListener("pointermove", (event) => {
    if (!grabbed) return;
    const now = axis(), by = ((grabbed.x - event.clientX) / (now.end - now.start)) * (grabbed.high - grabbed.low);
    if (Math.abs(grabbed.x - event.clientX) > 3) look(grabbed.low + by, grabbed.high + by);
  });
  addEventListener("pointerup", () => (grabbed = null));
  picture.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    zoom(Math.exp(-event.deltaY * 0.004), axis().time(event.clientX - picture.getBoundingClientRect().x));
  }, { passive: false });
  picture.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const act = { ...keys, "+": () => zoom(1.5), "=": () => zoom(1.5), "-": () => zoom(1 / 1.5), 0: () => look(from, to) }[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  });
  new ResizeObserver(() => picture.clientWidth && redraw()).observe(picture);

  return {
    picture, redraw, look, axis,
    // Moves what is shown as far as needed to have a time in it.
    keep: (begin, end) => {
      if (begin < low || end > high) look(begin - (high - low) / 2, begin + (high - low) / 2);
    },
    bounds: (begin, end) => {
      [from, to] = [begin, end];
      look(from, to);
    },
    tools: el("span", { class: "together" }, button("−", () => zoom(1 / 1.5), { "aria-label": "Zoom out" }), button("All", () => look(from, to)), button("+", () => zoom(1.5), { "aria-label": "Zoom in" })),
  };
}

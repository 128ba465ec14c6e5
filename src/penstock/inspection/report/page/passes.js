// Pass by pass: a slider over the pipeline, and what each pass changed, by names.

function passesView() {
  const passes = facts.passes;
  if (!passes) return { node: el("div", {}, view.title("Passes"), absent("An IR file holds the program alone. A dump folder (--dump-ir) shows what every pass did.")) };
  let at = Math.max(0, passes.findIndex((pass, i) => i > 0 && pass.changed));
  let wanted = "";
  const longest = Math.max(...passes.map((pass) => pass.ms || 0), 1e-9);
  const slider = el("input", { type: "range", id: "pass", min: 0, max: passes.length - 1, step: 1, value: at, "aria-label": "Pass",
    oninput: () => show(Number(slider.value)) });
  const filter = el("input", { type: "search", id: "pass-filter", placeholder: "only lines with …", "aria-label": "Only lines with", oninput: () => {
    wanted = filter.value.toLowerCase();
    body();
  } });
  const head = el("div", { class: "pass-head" }), changes = el("div", { class: "changes" });
  const entries = passes.map((pass, i) => {
    const time = sized(el("span"), (pass.ms || 0) / longest);
    return el("li", {}, el("button", { type: "button", class: pass.changed || i === 0 ? "" : "same", onclick: () => show(i) },
      el("span", { class: "number" }, String(pass.number)), el("span", { class: "what" }, pass.name), el("span", { class: "time", title: pass.ms === null ? null : `${pass.ms.toFixed(1)} ms` }, time)));
  });
  const list = el("ol", { class: "pass-list", "aria-label": "Passes" }, entries);

  function show(index) {
    at = Math.max(0, Math.min(passes.length - 1, index));
    const pass = passes[at], before = passes[at - 1];
    slider.value = at;
    slider.setAttribute("aria-valuetext", `${pass.number} ${pass.name}`);
    entries.forEach((entry, i) => entry.firstChild.setAttribute("aria-current", i === at ? "step" : "false"));
    if (list.scrollHeight > list.clientHeight) entries[at].scrollIntoView?.({ block: "nearest" });
    const gained = before ? pass.facts.filter((fact) => !before.facts.includes(fact)) : pass.facts;
    const grown = before ? pass.ops - before.ops : 0;
    put(head,
      el("h3", {}, `${pass.number}. ${pass.name}`),
      pass.does ? el("p", {}, pass.does) : null,
      pass.call !== pass.name ? el("code", { class: "call" }, pass.call) : null,
      el("dl", { class: "facts" },
        before && pass.ms !== null ? [el("dt", {}, "time"), el("dd", {}, `${pass.ms.toFixed(1)} ms`)] : null,
        el("dt", {}, "operations"), el("dd", {}, pass.ops.toLocaleString("en"), grown ? el("span", { class: grown > 0 ? "more" : "less" }, ` ${grown > 0 ? "+" : "−"}${Math.abs(grown).toLocaleString("en")}`) : null),
        gained.length ? [el("dt", {}, at ? "now holds" : "holds"), el("dd", {}, gained.join(", "))] : null),
    );
    body();
  }

  const saysIt = (row) => !wanted || (typeof row[2] === "string" ? row[2] : row[2].map(([, words]) => words).join("")).toLowerCase().includes(wanted)
    || row[1].some((name) => text(name).toLowerCase().includes(wanted));

  function body() {
    const pass = passes[at];
    const parts = pass.parts.map((part) => ({ ...part, rows: part.rows.filter(saysIt) })).filter((part) => part.rows.length || (!wanted && (part.moved || Object.keys(part.went).length || Object.keys(part.came).length)));
    if (!parts.length) {
      const why = at === 0 ? "This is what went into the pipeline." : !pass.changed ? "This pass changed nothing." : wanted ? "No changed line says that." : "Nothing changed but the order.";
      put(changes, absent(why));
      return;
    }
    put(changes, ...parts.map((part) => {
      const tally = ["+", "−", "~"].map((mark) => [mark, part.rows.filter((row) => row[0] === (mark === "−" ? "-" : mark)).length]).filter(([, times]) => times);
      return el("details", { class: "part", open: parts.length < 6 || part.rows.length < 40 },
        el("summary", {}, el("span", { class: "sign" }, part.mark === "~" ? "" : part.mark === "+" ? "new " : "gone "), el("strong", {}, part.title),
          el("span", { class: "tally" }, tally.map(([mark, times]) => el("span", { class: `mark-${mark}` }, `${mark}${times.toLocaleString("en")}`)))),
        [...Object.entries(part.went).map(([to, times]) => el("p", { class: "moved" }, `${plural(times, "operation")} now in @${to}`)),
          ...Object.entries(part.came).map(([from, times]) => el("p", { class: "moved" }, `${plural(times, "operation")} before in @${from}`))],
        several(part.rows, lineOf, 150),
        part.moved ? el("p", { class: "moved" }, `${plural(part.moved, "line")} in another place`) : null);
    }));
  }

  function lineOf([mark, names, words]) {
    const sign = { "+": "+", "-": "−", "~": "~" }[mark];
    const told = typeof words === "string" ? words : words.map(([kind, part]) => (kind === "-" ? el("del", {}, part) : kind === "+" ? el("ins", {}, part) : part));
    return el("div", { class: `line ${mark === "+" ? "plus" : mark === "-" ? "minus" : "tilde"}` }, el("span", { class: "sign" }, sign), el("code", {}, told));
  }

  show(at);
  return {
    node: el("div", {}, view.title("Passes", "What the compiler did, one pass after the other. Lines are compared by name."),
      el("div", { class: "slider" },
        button("‹", () => show(at - 1), { "aria-label": "Pass before" }), slider, button("›", () => show(at + 1), { "aria-label": "Next pass" })),
      el("div", { class: "passes" }, list, el("div", { class: "panel" }, head, el("div", { class: "filter" }, filter), changes))),
    go(index, word = "") {
      filter.value = word;
      wanted = word.toLowerCase();
      show(index);
    },
  };
}

// The page: tabs, the theme, keys that work everywhere. Views are made when they are first looked at, and all of them for printing.

const VIEWS = [
  ["overview", "Overview", overviewView], ["graph", "Graph", graphView], ["passes", "Passes", passesView], ["placement", "Placement", placementView],
  ["why", "Why this plan", whyView], ["schedule", "Schedule", scheduleView], ["memory", "Memory", memoryView], ["links", "Links", linksView], ["kernels", "Kernels", kernelsView],
];
const made = new Map();
let current = "";

function make(name) {
  if (!made.has(name)) {
    const [, label, build] = VIEWS.find(([each]) => each === name), box = byId(`view-${name}`);
    const found = build();
    put(box, found.node);
    box.setAttribute("aria-label", label);
    made.set(name, found);
  }
  return made.get(name);
}

function open(name, { focus = false } = {}) {
  const found = make(name);
  if (current !== name) {
    current = name;
    hideTip();
    for (const [each] of VIEWS) {
      const tab = byId(`tab-${each}`);
      byId(`view-${each}`).hidden = each !== name;
      tab.setAttribute("aria-selected", String(each === name));
      tab.tabIndex = each === name ? 0 : -1;
    }
    byId("tabs").scrollLeft = byId(`tab-${name}`).offsetLeft - 60;
    if (location.hash !== `#${name}`) history.replaceState(null, "", `#${name}`);
    scrollTo(0, 0);
    found.shown?.();
  }
  if (focus) byId(`tab-${name}`).focus();
  return found;
}

function openOperation(op) {
  open("graph").reveal(op);
  showOperation(op);
}

function openPass(index, word = "") {
  open("passes").go(index, word);
}

function openCopy(copy) {
  open("schedule").reveal(copy);
}

function openKernel(op) {
  open("kernels").find(op);
}

// ------------------------------------------------------------------------------------------ theme

const THEMES = ["auto", "light", "dark"];

function setTheme(theme, keep = true) {
  if (theme === "auto") document.documentElement.removeAttribute("data-theme");
  else document.documentElement.setAttribute("data-theme", theme);
  const sign = { auto: "◐", light: "☀", dark: "☾" }[theme];
  put(byId("theme"), el("span", { "aria-hidden": "true" }, sign), el("span", { class: "wide-only" }, { auto: "System", light: "Light", dark: "Dark" }[theme]));
  byId("theme").setAttribute("aria-label", `Theme: ${theme}. Change it`);
  byId("theme").dataset.theme = theme;
  try {
    if (keep) localStorage.setItem("penstock-theme", theme);
  } catch {
    // Files opened from a disk may have no storage: the theme is then of this visit.
  }
}

function keptTheme() {
  try {
    const kept = localStorage.getItem("penstock-theme");
    return THEMES.includes(kept) ? kept : "auto";
  } catch {
    return "auto";
  }
}

// ------------------------------------------------------------------------------------------ begin

byId("model").textContent = facts.summary.model;
for (const [name, label] of VIEWS) {
  byId("tabs").append(el("button", { type: "button", role: "tab", id: `tab-${name}`, "aria-controls": `view-${name}`, "aria-selected": "false", tabindex: -1, onclick: () => open(name) }, label));
  byId("main").append(el("section", { role: "tabpanel", id: `view-${name}`, class: "view", "aria-labelledby": `tab-${name}`, hidden: true }));
}
byId("main").append(el("footer", {}, `Penstock ${facts.version}`));
byId("tabs").addEventListener("keydown", (event) => {
  const names = VIEWS.map(([name]) => name), at = names.indexOf(current);
  const next = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: names.length - 1 }[event.key];
  if (next === undefined) return;
  event.preventDefault();
  open(names[(next + names.length) % names.length], { focus: true });
});
byId("theme").addEventListener("click", () => setTheme(THEMES[(THEMES.indexOf(byId("theme").dataset.theme) + 1) % THEMES.length]));
document.addEventListener("keydown", (event) => {
  const typing = /^(input|select|textarea)$/i.test(event.target.tagName);
  if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey) {
    event.preventDefault();
    byId("search").focus();
  } else if (event.key === "Escape") {
    if (!byId("tip").hidden) hideTip();
    else closeDetails();
  }
});
addEventListener("hashchange", () => {
  const name = location.hash.slice(1);
  if (VIEWS.some(([each]) => each === name)) open(name);
});
addEventListener("beforeprint", () => {
  for (const [name] of VIEWS) {
    const box = byId(`view-${name}`), before = box.hidden;
    box.hidden = false;
    make(name).shown?.();
    box.hidden = before;
  }
});
startSearch();
setTheme(keptTheme(), false);
open(VIEWS.some(([name]) => `#${name}` === location.hash) ? location.hash.slice(1) : "overview");
document.documentElement.dataset.ready = "";

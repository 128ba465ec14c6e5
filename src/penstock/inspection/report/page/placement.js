// Who runs what: ranks with their share of time and memory.

function placementView() {
  const place = facts.placement;
  if (!place) return { node: el("div", {}, view.title("Placement"), absent("Nothing is placed and scheduled yet: this program has not come that far.")) };
  const slowest = Math.max(...place.ranks.map((rank) => rank.seconds), 1e-30);
  const rows = place.ranks.map((rank) => {
    const [busy, waiting, idle] = rank.use, whole = busy + waiting + idle || 1;
    return [
      { value: rank.rank, node: String(rank.rank) },
      { value: rank.stage, node: el("span", {}, rank.stages.map(stageChip)) },
      { value: rank.device, node: el("span", {}, rank.device, el("small", {}, `${rank.kind}, ${plural(rank.threads, "thread")}, ${amount(rank.flops, "FLOP/s")}`)) },
      { value: rank.starts_at || "", node: rank.starts_at || "–" },
      rank.share,
      { value: rank.seconds, node: el("span", { class: "with-bar" }, seconds(rank.seconds), bar([[rank.seconds / slowest, stageClass(rank.stage)]], `${percent(rank.seconds / slowest)} of the slowest`)) },
      { value: busy / whole, node: el("span", { class: "with-bar short" }, percent(busy / whole), bar([[busy / whole, "busy", "busy"], [waiting / whole, "waiting", "waiting"], [idle / whole, "idle", "idle"]],
        `busy ${percent(busy / whole)}, waiting ${percent(waiting / whole)}`)) },
      { value: rank.peak, node: el("span", { class: "with-bar" }, bytes(rank.peak), rank.capacity ? bar([[rank.peak / rank.capacity, stageClass(rank.stage)]], `${percent(rank.peak / rank.capacity)} of ${bytes(rank.capacity)}`) : null,
        rank.capacity ? el("small", {}, `of ${bytes(rank.capacity)}`) : null) },
      rank.in_flight,
    ];
  });
  const columns = [["rank"], ["stage"], ["device"], ["starts at", "code"], ["microbatches", "number"], ["time per batch"], ["busy"], ["peak memory"], ["in flight", "number"]];
  return {
    node: el("div", {}, view.title("Placement", "Which device runs which part of the model, and what that costs it, as predicted."),
      panel("Ranks", table(columns, rows, { caption: "Ranks", sortable: true }))),
  };
}

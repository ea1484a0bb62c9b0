"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const { moments, events, keys } = data;
  const slots = data.num_blocks * data.block_size;
  const at = (id) => document.getElementById(id);
  const OCCUPANCY = { C: "committed", t: "transit", "–": "absent" };
  const IN_WORDS = { C: "in the pool", t: "on its way", "–": "absent" };
  const LETTER = { PENDING: "P", QUEUED: "Q", COPYING: "C", HOST_READY: "H", WRITTEN: "W", FAILED: "F", planned: "p",
    unplanned: "u", preserved: "v", fetched: "f", call: "", running: "", blocked: "z" };

  // Text goes into the page as text only, never as markup.
  function make(tag, attributes = {}, ...children) {
    const svg = ["svg", "rect", "line", "text", "title", "g"].includes(tag);
    const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.append(...children);
    return node;
  }

  // ---- the state of the slots after each moment, from the changes that the data holds
  const blank = Array.from({ length: slots }, () => [0, "", "", "–".repeat(keys.length)]);
  const states = [];
  for (const moment of moments) {
    const state = (states.length ? states[states.length - 1] : blank).slice();
    for (const [slot, ...rest] of moment.slots || []) state[slot] = rest;
    states.push(state);
  }

  // ---- blocks and slots
  const columns = []; // one for each event that changed a slot: its first and last moment
  moments.forEach((moment, i) => {
    if (!moment.slots) return;
    const last = columns[columns.length - 1];
    if (last && last.event === moment.event) last.moment = i;
    else columns.push({ event: moment.event, moment: i });
  });
  const wrong = new Set(data.failure ? data.failure.slots : []);

  function fill(cell, slot, [version, step, tenant, letters]) {
    cell.replaceChildren();
    if (version === 0) {
      cell.title = `slot ${slot}: never claimed`;
      return;
    }
    const who = make("span", { class: "who" }, make("span", {}, tenant || "given up"), make("i", {}, `v${version}`));
    const occ = make("span", {});
    [...letters].forEach((letter) => occ.append(make("span", { class: `occ ${OCCUPANCY[letter]}` }, letter)));
    cell.append(who, occ);
    const told = [...letters].map((letter, k) => `${keys[k].name}: ${IN_WORDS[letter]}`).join(", ");
    const owner = step === "" ? "a step that was never saved" : `step ${step}`;
    cell.title = `slot ${slot}, version ${version}, claimed by ${owner}${tenant ? ` for ${tenant}` : ""}; ${told}`;
  }

  const live = []; // by slot; none where the block is left out
  const columnCells = columns.map(() => []);
  function drawSlots() {
    const head = make("tr", {}, make("th", { class: "block" }, "block"), make("th", { class: "slot" }, "slot"),
      make("th", { class: "live" }, "now"));
    columns.forEach((column, c) => {
      const failing = data.failure && data.failure.event === column.event ? " failing" : "";
      const [name, words] = events[column.event] || ["between", "outside of every event"];
      const cell = make("th", { class: `cell${failing}`, title: words }, name);
      if (column.event >= 0) cell.append(make("small", {}, `event ${column.event}`));
      cell.addEventListener("click", () => select(column.moment));
      columnCells[c].push(cell);
      head.append(cell);
    });
    const body = make("tbody");
    const used = (block) => states[states.length - 1].slice(block * data.block_size, (block + 1) * data.block_size)
      .some(([version]) => version > 0);
    const idle = Array.from({ length: data.num_blocks }, (_, block) => block).filter((block) => !used(block));
    for (let slot = 0; slot < slots; slot++) {
      if (!used(Math.floor(slot / data.block_size))) continue;
      const last = slot % data.block_size === data.block_size - 1 ? "block-end" : "";
      const row = make("tr", { class: last });
      if (slot % data.block_size === 0) {
        const rows = { class: "block", rowspan: data.block_size, scope: "rowgroup" };
        row.append(make("th", rows, String(slot / data.block_size)));
      }
      row.append(make("th", { class: `slot${wrong.has(slot) ? " wrong" : ""}`, scope: "row" }, String(slot)));
      live[slot] = make("td", { class: "live" });
      row.append(live[slot]);
      columns.forEach((column, c) => {
        const state = states[column.moment][slot];
        const before = c ? states[columns[c - 1].moment][slot] : blank[slot];
        const cell = make("td", { class: `cell${state === before ? " same" : ""}` });
        fill(cell, slot, state);
        cell.addEventListener("click", () => select(column.moment));
        columnCells[c].push(cell);
        row.append(cell);
      });
      body.append(row);
    }
    at("slots").append(make("thead", {}, head), body);
    const note = !columns.length ? "No slot was claimed, or this driver does not tell."
      : idle.length ? `Left out, since nothing claims them: block${idle.length > 1 ? "s" : ""} ${idle.join(", ")}.` : "";
    if (note) at("slots-pane").append(make("p", { class: "note" }, note));
  }

  // ---- the list of moments
  const items = [];
  function drawMoments() {
    at("moments").classList.toggle("one", data.threads.length < 2);
    moments.forEach((moment, i) => {
      const number = moment.action === "call" && moment.event >= 0 ? `event ${moment.event}: ` : "";
      const item = make("li", { class: moment.action, id: `m${i}` }, make("span", { class: "n" }, String(i)),
        make("span", { class: "thread" }, moment.thread), make("span", {}, number + moment.words));
      item.addEventListener("click", () => select(i));
      items.push(item);
    });
    at("moments").append(...items);
  }

  // ---- threads, tasks and reads over the moments
  const ROW = 20, TOP = 18;
  const STEP = Math.max(6, Math.min(26, Math.floor(1100 / Math.max(1, moments.length))));
  const x = (moment) => moment * STEP;
  let cursor;
  function drawLanes() {
    const svg = at("lanes"), names = at("names");
    const groups = [["threads", data.threads], ["write tasks", data.tasks], ["hit reads", data.reads]];
    const rows = groups.filter(([, bars]) => bars.length);
    const height = TOP + rows.reduce((sum, [, bars]) => sum + ROW * (bars.length + 1), 0) + 6;
    const width = x(moments.length) + 2;
    svg.setAttribute("width", width);
    svg.setAttribute("height", height);
    names.append(make("div", { style: `height:${TOP}px` }));
    let lastLabel = -100;
    moments.forEach((moment, i) => {
      if (moment.action !== "call") return;
      svg.append(make("line", { class: "event", x1: x(i), x2: x(i), y1: TOP - 4, y2: height }));
      if (x(i) - lastLabel >= 20 && moment.event >= 0) {
        svg.append(make("text", { class: "soft", x: x(i) + 1, y: 11 }, String(moment.event)));
        lastLabel = x(i);
      }
    });
    let y = TOP;
    for (const [name, bars] of rows) {
      names.append(make("div", { class: "group", style: `height:${ROW}px;line-height:${ROW}px` }, name));
      svg.append(make("line", { class: "rule", x1: 0, x2: width, y1: y + 3, y2: y + 3 }));
      y += ROW;
      for (const bar of bars) {
        const label = make("div", { style: `height:${ROW}px;line-height:${ROW}px`, title: bar.title }, bar.name);
        names.append(label);
        drawBar(svg, bar, y);
        y += ROW;
      }
    }
    if (data.failure) {
      const where = x(moments.length - 1) + STEP / 2;
      svg.append(make("line", { class: "fail", x1: where, x2: where, y1: 0, y2: height }));
    }
    cursor = make("rect", { class: "cursor", y: 0, height, width: STEP, x: 0 });
    svg.append(cursor);
    svg.addEventListener("click", (event) => {
      const moment = Math.floor((event.clientX - svg.getBoundingClientRect().left) / STEP);
      select(Math.min(moments.length - 1, Math.max(0, moment)));
    });
  }

  function drawBar(svg, bar, y) {
    for (const [from, to, state] of bar.spans) {
      const box = { class: `span s-${state}`, x: x(from), y: y + 2, height: ROW - 4, width: Math.max(3, x(to) - x(from)) };
      const words = `${bar.title}: ${state.toLowerCase().replace("_", " ")}, moments ${from} to ${to - 1}`;
      svg.append(make("rect", box, make("title", {}, words)));
      if (LETTER[state] && x(to) - x(from) >= 8) {
        svg.append(make("text", { x: x(from) + Math.min(4, (x(to) - x(from) - 6) / 2), y: y + 13.5 }, LETTER[state]));
      }
    }
    for (const tick of bar.ticks) {
      const where = x(tick) + STEP / 2;
      svg.append(make("line", { class: "tick", x1: where, x2: where, y1: y + 6, y2: y + ROW - 6 }));
    }
  }

  function drawLegend() {
    const seen = new Set([...data.threads, ...data.tasks, ...data.reads].flatMap((bar) => bar.spans.map((span) => span[2])));
    const legend = document.querySelector(".legend");
    for (const state of Object.keys(LETTER).filter((name) => seen.has(name))) {
      const letter = LETTER[state] ? `${LETTER[state]} ` : "";
      const name = { call: "in a call", running: "running", blocked: "waiting" }[state] || state.toLowerCase().replace("_", " ");
      legend.append(make("span", { class: `swatch s-${state}` }, letter + name));
    }
    legend.append("The numbers above are events; a stroke in a thread is an action.");
  }

  // ---- one moment, in all panes
  let now = -1;
  function select(moment, silently = false) {
    if (!(moment >= 0 && moment < moments.length)) return;
    if (now >= 0) items[now].classList.remove("here");
    now = moment;
    const { event, words, thread } = moments[now];
    at("slider").value = now;
    const place = `moment ${now} of ${moments.length - 1}` + (event >= 0 ? `, in event ${event}` : "");
    at("now").replaceChildren(make("b", {}, place), ` · ${thread} · ${words}`);
    live.forEach((cell, slot) => fill(cell, slot, states[now][slot]));
    for (const read of data.reads) {
      const planned = read.spans.some(([from, to, state]) => state === "planned" && from <= now && now < to);
      for (const slot of planned ? read.slots.filter((one) => live[one]) : []) {
        live[slot].append(make("span", { class: "reader", title: `needed by the read of ${read.title}` }, read.name.split(",")[0]));
      }
    }
    let column = -1;
    columns.forEach((one, c) => { if (one.moment <= now || one.event === event) column = c; });
    columnCells.forEach((cells, c) => cells.forEach((cell) => cell.classList.toggle("here", c === column)));
    items[now].classList.add("here");
    reveal(at("moments"), items[now].offsetTop, items[now].offsetHeight, "scrollTop", "clientHeight");
    cursor.setAttribute("x", x(now));
    const pane = at("timeline"), left = at("names").offsetWidth;
    if (x(now) < pane.scrollLeft || x(now) + STEP > pane.scrollLeft + pane.clientWidth - left) {
      pane.scrollLeft = x(now) - (pane.clientWidth - left) / 2;
    }
    if (column >= 0) {
      const head = columnCells[column][0], grid = at("slots").parentElement;
      const fixed = 190; // the columns that stay
      const hidden = head.offsetLeft < grid.scrollLeft + fixed;
      if (hidden || head.offsetLeft + head.offsetWidth > grid.scrollLeft + grid.clientWidth) {
        grid.scrollLeft = head.offsetLeft - fixed - (grid.clientWidth - fixed) / 2;
      }
    }
    if (!silently) history.replaceState(null, "", `#moment=${now}`);
  }

  function reveal(pane, start, size, scroll, client) {
    if (start < pane[scroll] || start + size > pane[scroll] + pane[client]) {
      pane[scroll] = Math.max(0, start - pane[client] / 2);
    }
  }

  const isCall = (moment) => moment.action === "call" || moment.action === "failure";
  function nextEvent(by) {
    let i = now + by;
    while (i > 0 && i < moments.length - 1 && !isCall(moments[i])) i += by;
    return Math.min(moments.length - 1, Math.max(0, i));
  }

  const failing = moments.length - 1;
  const moves = {
    first: ["Home", () => 0], back: ["ArrowLeft", () => now - 1], forth: ["ArrowRight", () => now + 1],
    last: ["End", () => moments.length - 1], "event-back": ["PageUp", () => nextEvent(-1)],
    "event-forth": ["PageDown", () => nextEvent(1)],
  };
  for (const [id, [, to]] of Object.entries(moves)) at(id).addEventListener("click", () => select(to()));
  at("slider").addEventListener("input", () => select(Number(at("slider").value)));
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    const move = Object.values(moves).find(([key]) => key === event.key);
    const to = event.key === "f" || event.key === "F" ? failing : move && move[1]();
    if (to === undefined) return;
    event.preventDefault();
    select(to);
  });

  function fromAddress() {
    const match = /^#moment=(\d+)$/.exec(location.hash);
    select(match ? Math.min(Number(match[1]), moments.length - 1) : data.failure ? failing : 0, true);
  }
  drawSlots();
  drawMoments();
  drawLanes();
  drawLegend();
  window.addEventListener("hashchange", fromAddress);
  fromAddress();
  document.documentElement.dataset.ready = String(moments.length);
})();

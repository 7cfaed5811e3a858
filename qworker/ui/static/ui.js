// Updates the page while it can be seen, shows times in the zone of the reader, and serves the keyboard. Every page works without it.
"use strict";

const EVERY = 2000;
const SLOWEST = 30000;
const $ = (id) => document.getElementById(id);
const main = $("main");

// What the reader has chosen. A browser may refuse to keep it.
const kept = (name) => {
  try {
    return localStorage.getItem("qworker-" + name);
  } catch {
    return null;
  }
};
const keep = (name, value) => {
  try {
    localStorage.setItem("qworker-" + name, value);
  } catch {
    // It counts for this page only.
  }
  choices[name] = value;
};
const choices = { zone: kept("zone") || "local", keys: kept("keys") || "on" };

// -- times ------------------------------------------------------------------------------------------------------------

const two = (number) => String(number).padStart(2, "0");
const dayOf = (at) => `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())}`;
const clockOf = (at) => `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;

// Milliseconds by which the clock of the server is ahead of this one, from the moment at which the page began to arrive.
const arrived = performance.getEntriesByType("navigation")[0]?.responseStart ?? performance.now();
const ahead = 1000 * document.documentElement.dataset.now - (Date.now() - performance.now() + arrived);

// The same text as that of the server.
const ageText = (seconds) => {
  for (const [limit, unit, name] of [[120, 1, "s"], [7200, 60, "min"], [172800, 3600, "h"]])
    if (seconds < limit) return `${Math.round(seconds / unit)} ${name}`;
  return `${Math.round(seconds / 86400)} d`;
};

const showAges = (root) => {
  for (const time of root.querySelectorAll("time[data-age]")) {
    const form = time.dataset.age;
    const since = (Date.now() + ahead - Date.parse(time.dateTime)) / 1000;
    const text = form.replace("{}", ageText(Math.max(0, form === "in {}" ? -since : since)));
    if (time.textContent !== text) time.textContent = text;
    time.title = time.dateTime;
  }
};

const showTimes = (root) => {
  const isLocal = choices.zone === "local";
  showAges(root);
  for (const time of root.querySelectorAll("time[datetime]:not([data-age])")) {
    time.dataset.utc ??= time.textContent;
    const at = new Date(time.dateTime);
    const text = isLocal && !Number.isNaN(at.getTime()) ? `${dayOf(at)} ${clockOf(at)}` : time.dataset.utc;
    if (time.textContent !== text) time.textContent = text;
    time.classList.toggle("local", text !== time.dataset.utc);
  }
  // The labels of charts. Those without a clock are days.
  for (const label of root.querySelectorAll("text[data-at]")) {
    label.dataset.utc ??= label.textContent;
    if (!label.dataset.utc.includes(":")) continue;
    const local = clockOf(new Date(1000 * label.dataset.at)).slice(0, label.dataset.utc.length);
    label.textContent = isLocal ? local : label.dataset.utc;
  }
};

// -- updates ----------------------------------------------------------------------------------------------------------

let tag = null;
let pause = EVERY;
let timer = null;
let isPaused = false;

const say = (text, kind) => {
  const live = $("live");
  live.hidden = false;
  // A screen reader announces only a change.
  if (live.textContent !== text) live.textContent = text;
  live.className = "live " + kind;
};

// Selected text stays as it is.
const isSelecting = () => {
  const selection = document.getSelection();
  return selection && !selection.isCollapsed && main.contains(selection.anchorNode);
};

// So does what was opened, checked or typed.
const keepChanges = (before, after) => {
  if (before.matches?.("details")) after.toggleAttribute("open", before.open);
  if (before.matches?.("input")) return before.checked === before.defaultChecked && before.value === before.defaultValue;
  return !before.matches?.("textarea") || before.value === before.defaultValue;
};

const update = async () => {
  if (isSelecting()) return;
  const headers = { "X-Qworker-Fragment": "1" };
  if (tag) headers["If-None-Match"] = tag;
  const answer = await fetch(location.href, { headers, credentials: "same-origin", redirect: "manual" });
  if (answer.status === 401) {
    location.reload();
    return;
  }
  // 503: the store does not answer, and the page says so.
  if (answer.status === 200 || answer.status === 503) {
    const text = await answer.text();
    if (isSelecting() || isPaused) return;
    tag = answer.headers.get("ETag");
    const page = new DOMParser().parseFromString(text, "text/html");
    // The times of both are texts in the same zone, so that only what has changed is touched.
    showTimes(page);
    Idiomorph.morph(main, page.getElementById("main"), {
      ignoreActiveValue: true,
      callbacks: { beforeNodeMorphed: keepChanges },
    });
    showPointer();
  } else if (answer.status !== 304) {
    throw new Error(String(answer.status));
  }
};

const tick = async () => {
  timer = null;
  try {
    await update();
    // Time passes, even if nothing else has changed.
    if (!isSelecting()) showAges(main);
    pause = EVERY;
    if (!isPaused) say("Live", "good");
  } catch {
    pause = Math.min(pause * 2, SLOWEST);
    if (!isPaused) say("Connection lost", "bad");
  }
  schedule(pause);
};

const schedule = (wait) => {
  clearTimeout(timer);
  timer = document.hidden || isPaused ? null : setTimeout(tick, wait);
};

const togglePause = () => {
  isPaused = !isPaused;
  say(isPaused ? "Paused" : "Live", isPaused ? "warn" : "good");
  schedule(0);
};

const startUpdates = () => {
  say("Live", "good");
  schedule(EVERY);
  $("live").addEventListener("click", togglePause);
  document.addEventListener("visibilitychange", () => schedule(0));
};

// -- charts -----------------------------------------------------------------------------------------------------------

// Where the pointer is, as a part of the width of a chart. All charts of a page show the same moment.
let pointer = null;

const showPointer = () => {
  const rows = [...main.querySelectorAll(".numbers tbody tr")];
  const row = pointer === null ? rows.at(-1) : rows[Math.round(pointer * (rows.length - 1))];
  if (!row) return;
  let column = 1;
  for (const figure of main.querySelectorAll(".charts figure")) {
    for (const value of figure.querySelectorAll(".legend b")) value.textContent = row.cells[column++].textContent;
    figure.querySelector("figcaption time")?.remove();
    figure.querySelector(".cursor")?.remove();
    if (pointer === null) continue;
    figure.querySelector("figcaption").append(row.cells[0].firstElementChild.cloneNode(true));
    const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
    const x = 100 * pointer + "%";
    for (const [name, at] of [["x1", x], ["x2", x], ["y1", "0"], ["y2", "100%"]]) line.setAttribute(name, at);
    line.classList.add("cursor");
    figure.querySelector(".lines").append(line);
  }
};

const followPointer = (event) => {
  const plane = event.target.closest?.(".charts figure")?.querySelector(".plane");
  if (!plane && pointer === null) return;
  const box = plane?.getBoundingClientRect();
  pointer = box ? Math.min(1, Math.max(0, (event.clientX - box.left) / box.width)) : null;
  showPointer();
};

// -- the keyboard -----------------------------------------------------------------------------------------------------

let isGoing = false;

const step = (by) => {
  const links = [...main.querySelectorAll("tbody tr")].map((row) => row.querySelector("th a, td a")).filter(Boolean);
  const row = document.activeElement.closest?.("tbody tr");
  const at = links.findIndex((link) => link.closest("tr") === row);
  links[at < 0 ? (by > 0 ? 0 : links.length - 1) : at + by]?.focus();
};

const actions = {
  "/": () => $("find")?.focus(),
  "?": () => $("help").showModal(),
  " ": togglePause,
  j: () => step(1),
  k: () => step(-1),
  g: () => {
    isGoing = true;
    setTimeout(() => (isGoing = false), 1500);
  },
};

const press = (event) => {
  if (choices.keys === "off" || event.ctrlKey || event.metaKey || event.altKey || $("help").open) return;
  const isField = event.target.matches?.("input, textarea, select");
  // A space presses what has the focus, and moves in a text that scrolls.
  if (isField || (event.key === " " && (!$("live") || event.target.matches?.("button, summary, pre")))) return;
  const place = isGoing && document.querySelector(`nav.pages a[data-key="${CSS.escape(event.key)}"]`);
  isGoing = false;
  const action = place ? () => place.click() : actions[event.key];
  if (!action) return;
  event.preventDefault();
  action();
};

const startHelp = () => {
  $("help-open").hidden = false;
  $("help-open").addEventListener("click", () => $("help").showModal());
  const zone = $("zone");
  zone.checked = choices.zone === "utc";
  zone.addEventListener("change", () => {
    keep("zone", zone.checked ? "utc" : "local");
    showTimes(document);
  });
  const keys = $("keys");
  keys.checked = choices.keys === "on";
  keys.addEventListener("change", () => keep("keys", keys.checked ? "on" : "off"));
};

showTimes(document);
if ($("help")) {
  startHelp();
  document.addEventListener("keydown", press);
}
if ($("live")) startUpdates();
document.addEventListener("pointermove", followPointer);

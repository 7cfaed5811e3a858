// Updates the page while it can be seen, and shows times in the zone of the reader. Every page works without it.
"use strict";

const EVERY = 2000;
const SLOWEST = 30000;
let tag = null;
let pause = EVERY;
let timer = null;

const say = (text, kind) => {
  const live = document.getElementById("live");
  if (!live) return;
  live.hidden = false;
  // A screen reader announces only a change.
  if (live.textContent !== text) live.textContent = text;
  live.className = "live " + kind;
};

const localTimes = () => {
  const form = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium", hourCycle: "h23" });
  for (const time of document.querySelectorAll("time[datetime]")) {
    const at = new Date(time.dateTime);
    if (!Number.isNaN(at.getTime())) time.textContent = form.format(at);
  }
};

// What the reader works with stays as it is.
const isInUse = () => {
  const main = document.getElementById("main");
  const selection = document.getSelection();
  const selects = selection && !selection.isCollapsed && main.contains(selection.anchorNode);
  const active = document.activeElement;
  return selects || (active && main.contains(active) && active.matches("input, textarea, select"));
};

const keepOpen = (before, after) => {
  if (before.matches?.("details")) after.toggleAttribute("open", before.open);
};

const update = async () => {
  if (isInUse()) return;
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
    if (isInUse()) return;
    tag = answer.headers.get("ETag");
    const page = new DOMParser().parseFromString(text, "text/html");
    Idiomorph.morph(document.getElementById("main"), page.getElementById("main"), {
      ignoreActiveValue: true,
      callbacks: { beforeNodeMorphed: keepOpen },
    });
    localTimes();
  } else if (answer.status !== 304) {
    throw new Error(String(answer.status));
  }
};

const tick = async () => {
  timer = null;
  try {
    await update();
    pause = EVERY;
    say("Live", "good");
  } catch {
    pause = Math.min(pause * 2, SLOWEST);
    say("Connection lost", "bad");
  }
  schedule(pause);
};

const schedule = (wait) => {
  if (timer === null && !document.hidden) timer = setTimeout(tick, wait);
};

localTimes();
if (document.querySelector("main[data-live]")) {
  say("Live", "good");
  schedule(EVERY);
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) {
      clearTimeout(timer);
      timer = null;
    } else {
      schedule(0);
    }
  });
}
document.addEventListener("keydown", (event) => {
  if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.matches?.("input, textarea, select")) return;
  const field = document.getElementById("find");
  if (field) {
    event.preventDefault();
    field.focus();
  }
});

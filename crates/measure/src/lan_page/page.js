"use strict";

const LOAD_MS = 8000;
const FLOWS = 6;
const UPLOAD_BYTES = 4 << 20;

const show = (id, text) => { document.getElementById(id).textContent = text; };

const percentile = (values, percent) => {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.max(0, Math.ceil((percent / 100) * sorted.length) - 1)];
};

const showTimes = (name, times) => {
  const text = (percent) => (times.length ? `${percentile(times, percent).toFixed(1)} ms` : "–");
  show(`${name}-p50`, text(50));
  show(`${name}-p99`, text(99));
};

const ping = async () => {
  const began = performance.now();
  const answer = await fetch("ping", { cache: "no-store" });
  const text = await answer.text();
  if (!answer.ok) throw new Error(text || `status ${answer.status}`);
  return performance.now() - began;
};

/** Round trips until `isOver` says that it is enough. */
const pings = async (isOver) => {
  const times = [];
  while (!isOver(times.length)) {
    times.push(await ping());
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
  return times;
};

/** Reads one response, and counts its bytes, until it is aborted. */
const download = async (signal, count) => {
  const answer = await fetch("down", { cache: "no-store", signal });
  if (!answer.ok) throw new Error(await answer.text());
  const reader = answer.body.getReader();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    count(value.length);
  }
};

/** Sends bodies one after the other, and counts their bytes as they leave, until it is aborted. */
const upload = async (signal, count) => {
  const body = new Uint8Array(UPLOAD_BYTES);
  while (!signal.aborted) {
    await new Promise((resolve, reject) => {
      const request = new XMLHttpRequest();
      let counted = 0;
      request.upload.onprogress = (event) => { count(event.loaded - counted); counted = event.loaded; };
      request.onload = () => (request.status === 200 ? resolve() : reject(new Error(request.responseText)));
      request.onerror = () => reject(new Error("the connection broke"));
      request.onabort = () => resolve();
      signal.addEventListener("abort", () => request.abort(), { once: true });
      request.open("POST", "up");
      request.send(body);
    });
  }
};

const load = async (name, flow) => {
  const control = new AbortController();
  let bytes = 0;
  const began = performance.now();
  const rate = () => `${((bytes * 8) / (performance.now() - began) / 1000).toFixed(1)} Mbit/s`;
  const isOver = () => performance.now() - began >= LOAD_MS;
  const shown = setInterval(() => show(`${name}-rate`, rate()), 250);
  const running = Array.from({ length: FLOWS }, () =>
    flow(control.signal, (more) => { bytes += more; }).catch((error) => {
      if (!control.signal.aborted) throw error;
    }));
  try {
    const failed = Promise.all(running).then(() => new Promise(() => {}));
    showTimes(name, await Promise.race([pings(isOver), failed]));
    show(`${name}-rate`, rate());
  } finally {
    clearInterval(shown);
    control.abort();
    await Promise.allSettled(running);
  }
};

const run = async () => {
  const button = document.getElementById("start");
  button.disabled = true;
  try {
    show("step", "Round trips without load …");
    showTimes("idle", await pings((count) => count >= 40));
    show("step", "Download …");
    await load("down", download);
    show("step", "Upload …");
    await load("up", upload);
    show("step", "Done.");
  } catch (error) {
    show("step", `The test has failed: ${error.message}`);
  }
  button.disabled = false;
};

document.getElementById("start").addEventListener("click", run);

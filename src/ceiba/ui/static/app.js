// The page as a whole: views, theme, key and the server's health.

import { get, key } from "./api.js";
import * as chat from "./chat.js";
import { $ } from "./dom.js";
import * as engine from "./engine.js";
import * as settings from "./settings.js";

const VIEWS = ["chat", "engine"];
const THEMES = ["system", "light", "dark"];

function show(view) {
  for (const name of VIEWS) {
    $(`view-${name}`).hidden = name !== view;
    $(`tab-${name}`).setAttribute("aria-selected", String(name === view));
  }
  if (view === "engine") engine.open();
  else engine.pause();
}

function theme(name) {
  if (name === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  $("theme-button").setAttribute("aria-label", `Theme: ${name === "system" ? "follows the system" : name}`);
  $("theme-button").title = $("theme-button").getAttribute("aria-label");
}

async function health() {
  let state = "gone";
  try {
    state = (await get("health", [503])).status;
    if (state === "ok" || state === "starting") {
      const info = await get("v1/models");
      $("model").textContent = info.data[0]?.id ?? "no model";
    }
  } catch (error) {
    if (error.status === 401) {
      state = "ok";
      $("model").textContent = "needs an API key";
    } else {
      $("model").textContent = "not reachable";
    }
  }
  $("status").dataset.state = state;
  $("status").title = `The server's health: ${state}`;
}

function keys() {
  const dialog = $("key-dialog");
  const mark = () => ($("key-button").dataset.on = String(Boolean(key.get())));
  $("key-button").addEventListener("click", () => {
    $("key").value = key.get();
    dialog.returnValue = "";
    dialog.showModal();
  });
  dialog.addEventListener("close", () => {
    if (dialog.returnValue === "save") key.set($("key").value.trim());
    if (dialog.returnValue === "clear") key.set("");
    mark();
    health();
  });
  dialog.querySelector("form").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.target !== $("key")) return;
    event.preventDefault();
    dialog.close("save");
  });
  mark();
}

for (const name of VIEWS) $(`tab-${name}`).addEventListener("click", () => show(name));
let chosen = localStorage.getItem("ceiba-theme") ?? "system";
theme(chosen);
$("theme-button").addEventListener("click", () => {
  chosen = THEMES[(THEMES.indexOf(chosen) + 1) % THEMES.length];
  localStorage.setItem("ceiba-theme", chosen);
  theme(chosen);
});
settings.start();
chat.start();
engine.start();
keys();
health();
setInterval(health, 5000);
if (location.hash === "#engine") show("engine");

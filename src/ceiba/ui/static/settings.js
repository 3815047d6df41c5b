// The panel beside the chat: what it holds becomes fields of the request; what is left empty is not sent.

import { $ } from "./dom.js";

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "frequency_penalty", "presence_penalty"];
const EXAMPLE_SCHEMA = {
  type: "object",
  properties: { name: { type: "string" }, founded_year: { type: "integer" }, location: { type: "string" } },
  required: ["name", "founded_year", "location"],
  additionalProperties: false,
};
const EXAMPLE_TOOLS = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "The weather in a city",
      parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
    },
  },
];

export function start() {
  $("schema").value = JSON.stringify(EXAMPLE_SCHEMA, null, 2);
  $("tools").value = JSON.stringify(EXAMPLE_TOOLS, null, 2);
  for (const output of document.querySelectorAll("output[for]")) {
    const input = $(output.htmlFor.value);
    const show = () => (output.value = Number(input.value).toFixed(2));
    input.addEventListener("input", show);
    show();
  }
  for (const name of ["schema", "tools"]) {
    const check = () => {
      $(`${name}-badge`).hidden = !$(`${name}-on`).checked;
      $(`${name}-problem`).textContent = $(`${name}-on`).checked ? problem(name) : "";
    };
    $(name).addEventListener("input", check);
    $(`${name}-on`).addEventListener("change", check);
  }
  $("settings-button").addEventListener("click", () => $("settings").classList.add("open"));
  $("settings-close").addEventListener("click", () => $("settings").classList.remove("open"));
}

function problem(name) {
  try {
    const value = JSON.parse($(name).value);
    if (name === "tools" && !Array.isArray(value)) return "Tools are a JSON list.";
    if (name === "schema" && (typeof value !== "object" || value === null)) return "A schema is a JSON object.";
    return "";
  } catch (error) {
    return error.message;
  }
}

/** The request's fields. Throws with the panel's problem where its JSON cannot be read. */
export function fields() {
  const found = {};
  for (const name of NUMBERS) {
    const text = $(name).value.trim();
    if (text !== "") found[name] = Number(text);
  }
  const stops = $("stop").value.split("\n").filter((line) => line !== "");
  if (stops.length) found.stop = stops;
  for (const name of ["schema", "tools"]) {
    if (!$(`${name}-on`).checked) continue;
    const wrong = problem(name);
    if (wrong) {
      $(`${name}-panel`).open = true;
      throw new Error(`${name === "tools" ? "Tools" : "JSON schema"}: ${wrong}`);
    }
  }
  if ($("schema-on").checked) {
    const schema = JSON.parse($("schema").value);
    found.response_format = { type: "json_schema", json_schema: { name: "answer", schema, strict: true } };
  }
  if ($("tools-on").checked) {
    found.tools = JSON.parse($("tools").value);
    found.tool_choice = $("tool_choice").value;
  }
  return found;
}

export function system() {
  return $("system").value.trim();
}

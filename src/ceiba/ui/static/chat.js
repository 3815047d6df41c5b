// The conversation: sends it, shows the answer as it comes, and what it cost.

import { events } from "./api.js";
import { $, count, make, seconds } from "./dom.js";
import { render } from "./markdown.js";
import * as settings from "./settings.js";

const IDEAS = ["Explain a radix tree in two sentences", "Write a haiku about caches", "Name three primes and why they are"];
let messages = [];
let running = null;

export function start() {
  for (const idea of IDEAS) {
    $("ideas").append(make("button", { type: "button", onclick: () => ask(idea) }, idea));
  }
  const input = $("input");
  const grow = () => {
    input.style.height = "auto";
    input.style.height = `${input.scrollHeight + 2}px`;
  };
  input.addEventListener("input", grow);
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      $("composer").requestSubmit();
    }
  });
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    if (running) {
      running.abort();
      return;
    }
    const text = input.value.trim();
    if (!text) return;
    input.value = "";
    grow();
    ask(text);
  });
  $("clear").addEventListener("click", () => {
    running?.abort();
    messages = [];
    for (const turn of document.querySelectorAll(".turn")) turn.remove();
    $("hello").hidden = false;
    input.focus();
  });
  input.focus();
}

function ask(text) {
  if (running) return;
  messages.push({ role: "user", content: text });
  add(make("div", { class: "turn user" }, make("div", { class: "body" }, text)));
  answer();
}

function add(element) {
  $("hello").hidden = true;
  $("log").append(element);
  $("log").scrollTop = $("log").scrollHeight;
}

async function answer() {
  const turn = new Turn();
  add(turn.element);
  const history = messages;
  running = new AbortController();
  $("send").textContent = "Stop";
  $("send").classList.add("stop");
  try {
    const prompt = settings.system();
    const body = {
      model: "default",
      messages: prompt ? [{ role: "system", content: prompt }, ...history] : history,
      stream: true,
      stream_options: { include_usage: true },
      ...settings.fields(),
    };
    turn.sent();
    for await (const event of events("v1/chat/completions", body, running.signal)) turn.take(event);
  } catch (error) {
    if (error.name === "AbortError") turn.stopped();
    else turn.failed(error.message);
  } finally {
    running = null;
    $("send").textContent = "Send";
    $("send").classList.remove("stop");
    turn.close();
  }
  if (history === messages && turn.message) messages.push(turn.message);
  if (turn.calls.length) turn.askForResults((results) => {
    if (history !== messages || running) return;
    for (const { call, text } of results) {
      messages.push({ role: "tool", tool_call_id: call.id, content: text });
      add(make("div", { class: "turn tool" }, make("div", { class: "body", "data-name": call.function.name }, text)));
    }
    answer();
  });
}

/** One answer on the page. */
class Turn {
  constructor() {
    this.text = "";
    this.thought = "";
    this.calls = [];
    this.usage = null;
    this.finish = null;
    this.body = make("div", { class: "body" });
    this.element = make("div", { class: "turn assistant waiting" }, this.body);
    this.drawn = true;
  }

  sent() {
    this.start = performance.now();
  }

  take(event) {
    this.usage = event.usage ?? this.usage;
    for (const choice of event.choices ?? []) {
      const delta = choice.delta ?? {};
      if (delta.content || delta.reasoning_content || delta.tool_calls) {
        this.last = performance.now();
        this.first ??= this.last;
      }
      this.text += delta.content ?? "";
      this.thought += delta.reasoning_content ?? "";
      for (const piece of delta.tool_calls ?? []) this.addCall(piece);
      this.finish = choice.finish_reason ?? this.finish;
    }
    if (this.drawn) {
      this.drawn = false;
      requestAnimationFrame(() => this.draw());
    }
  }

  addCall(piece) {
    const call = (this.calls[piece.index ?? 0] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
    call.id = piece.id || call.id;
    call.function.name += piece.function?.name ?? "";
    call.function.arguments += piece.function?.arguments ?? "";
  }

  draw() {
    this.drawn = true;
    const log = $("log");
    const follow = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
    this.body.replaceChildren(render(this.text));
    if (this.thought) {
      if (!this.thinking) {
        this.thinking = make("div");
        this.element.prepend(
          make("details", { class: "thought", open: !this.text }, make("summary", {}, "Thinking"), this.thinking),
        );
      }
      this.thinking.textContent = this.thought;
    }
    if (follow) log.scrollTop = log.scrollHeight;
  }

  stopped() {
    this.finish = "stopped here";
  }

  failed(message) {
    this.element.append(make("div", { class: "failure", role: "alert" }, message));
  }

  close() {
    this.draw();
    this.element.classList.remove("waiting");
    this.facts();
    if (this.text || this.calls.length) {
      this.message = { role: "assistant", content: this.text };
      if (this.calls.length) this.message.tool_calls = this.calls;
    }
    $("log").scrollTop = $("log").scrollHeight;
  }

  facts() {
    const row = make("div", { class: "facts" });
    if (this.usage) {
      const { prompt_tokens: prompt, completion_tokens: made } = this.usage;
      const cached = this.usage.prompt_tokens_details?.cached_tokens ?? 0;
      const fill = make("i");
      fill.style.width = `${prompt ? (100 * cached) / prompt : 0}%`;
      row.append(
        make(
          "span",
          { title: "Prompt tokens that the prefix cache held", "data-cached": cached, "data-prompt": prompt },
          make("span", { class: "meter" }, fill),
          make("b", {}, `${count(cached)} of ${count(prompt)}`),
          " prompt tokens cached",
        ),
        fact(count(made), made === 1 ? " token" : " tokens"),
      );
      if (this.first) {
        row.append(fact(seconds((this.first - this.start) / 1000), " to the first"));
        const span = (this.last - this.first) / 1000;
        if (made > 1 && span > 0) row.append(fact(((made - 1) / span).toFixed(1), " tokens/s"));
      }
    }
    if (this.finish && this.finish !== "stop") {
      const words = { length: "cut at max tokens", tool_calls: "calls tools", abort: "aborted" };
      row.append(make("span", {}, words[this.finish] ?? this.finish));
    }
    if (row.childNodes.length) this.element.append(row);
  }

  askForResults(done) {
    const inputs = this.calls.map((call) => {
      const input = make("input", { placeholder: "Result to give back", "aria-label": "Tool result" });
      const form = make("form", {}, input, make("button", { class: "primary" }, "Return"));
      form.addEventListener("submit", (event) => {
        event.preventDefault();
        if (inputs.some((other) => !other.value.trim())) return;
        done(this.calls.map((entry, i) => ({ call: entry, text: inputs[i].value })));
        for (const other of inputs) other.form.remove();
      });
      this.element.insertBefore(
        make("div", { class: "call" }, make("strong", {}, call.function.name), make("pre", {}, pretty(call)), form),
        this.element.querySelector(".facts"),
      );
      return input;
    });
    inputs[0].focus();
  }
}

function fact(value, words) {
  return make("span", {}, make("b", {}, value), words);
}

function pretty(call) {
  try {
    return JSON.stringify(JSON.parse(call.function.arguments), null, 2);
  } catch {
    return call.function.arguments;
  }
}

// @ai-sdk/openai-compatible: text whole and streamed, tools in steps, objects, errors. `node ai_sdk.mjs URL`
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const url = process.argv[2];
const provider = createOpenAICompatible({
  name: "ceiba",
  baseURL: `${url}/v1`,
  apiKey: "none",
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const model = provider("smol");
const prompt = "What is the capital of France?";
const common = { model, prompt, temperature: 0, maxRetries: 0 };

const reply = await fetch(`${url}/v1/chat/completions`, {
  method: "POST",
  body: JSON.stringify({ messages: [{ role: "user", content: prompt }], temperature: 0, max_tokens: 10 }),
});
const wanted = (await reply.json()).choices[0].message.content;

const whole = await generateText({ ...common, maxOutputTokens: 10 });
assert.equal(whole.text, wanted);
assert.ok(whole.usage.outputTokens > 0);

const stream = streamText({ ...common, maxOutputTokens: 10 });
const pieces = [];
for await (const piece of stream.textStream) pieces.push(piece);
assert.equal(pieces.join(""), wanted);
assert.ok(pieces.length > 3);
assert.equal((await stream.usage).outputTokens, whole.usage.outputTokens);
assert.equal(await stream.finishReason, whole.finishReason);

const called = [];
const tools = {
  get_weather: tool({
    description: "The weather of a city.",
    inputSchema: z.object({ city: z.enum(["Paris", "Rome"]) }),
    execute: async ({ city }) => {
      called.push(city);
      return `sunny in ${city}`;
    },
  }),
};
const providerOptions = { ceiba: { parallel_tool_calls: false } };
const asked = {
  ...common,
  tools,
  providerOptions,
  maxOutputTokens: 100,
  stopWhen: stepCountIs(2),
  prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
};
const stepped = await generateText(asked);
assert.equal(called.length, 1);
assert.equal(stepped.steps.length, 2);
assert.ok(["Paris", "Rome"].includes(stepped.steps[0].toolCalls[0].input.city));
assert.equal(stepped.steps[0].finishReason, "tool-calls");
const streamed = streamText(asked);
let text = "";
for await (const piece of streamed.textStream) text += piece;
assert.equal(called.length, 2);
assert.deepEqual(called[0], called[1]);
assert.equal(text, stepped.text);

const schema = z.object({ name: z.enum(["Paris", "Rome"]), big: z.boolean() });
const { object } = await generateObject({ ...common, schema, maxOutputTokens: 120 });
assert.equal(typeof object.big, "boolean");

await assert.rejects(generateText({ ...common, temperature: -1 }), (error) => {
  assert.equal(error.statusCode, 400);
  assert.match(error.message, /temperature/);
  return true;
});
console.log("ok");

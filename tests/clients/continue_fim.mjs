// One gap filled by the library with which Continue talks to models:
// node continue_fim.mjs FOLDER_OF_NODE_MODULES BASE KEY MODEL PREFIX
import { join } from "node:path";
import { pathToFileURL } from "node:url";

const [folder, apiBase, apiKey, model, prompt] = process.argv.slice(2);
const file = join(folder, "@continuedev", "openai-adapters", "dist", "index.js");
const { constructLlmApi } = await import(pathToFileURL(file).href);
const api = constructLlmApi({ provider: "openai", apiBase, apiKey });
const body = { model, prompt, suffix: "\n", max_tokens: 600, stream: true };
for await (const chunk of api.fimStream(body, new AbortController().signal)) {
  process.stdout.write(chunk.choices[0].delta.content ?? "");
}

// The HTTP API as the gateway describes it, drawn by Swagger UI.
"use strict";

const find = (id) => document.getElementById(id);
let key = ""; // kept until the page is left, nowhere else

async function describe() {
  const answer = await fetch("openapi.json", { headers: key ? { authorization: `Bearer ${key}` } : {} });
  find("key-form").hidden = answer.status !== 401;
  if (answer.ok) {
    find("problem").textContent = "";
    SwaggerUIBundle({
      spec: await answer.json(),
      domNode: find("api"),
      defaultModelsExpandDepth: 0,
      requestInterceptor: (request) => {
        if (key) request.headers.authorization = `Bearer ${key}`;
        return request;
      },
    });
  } else if (answer.status !== 401 || key) {
    const told = await answer.json().catch(() => null);
    find("problem").textContent = told?.error?.message ?? `status ${answer.status}`;
  }
}

find("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = find("key").value.trim();
  find("key").value = "";
  describe();
});
const dark = matchMedia("(prefers-color-scheme: dark)");
const recolour = () => document.documentElement.classList.toggle("dark-mode", dark.matches);
dark.addEventListener("change", recolour);
recolour();
describe();

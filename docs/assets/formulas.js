// Typeset what arithmatex has marked as \( ... \) or \[ ... \]. KaTeX is in assets/katex. Parts of a
// displayed formula that \qquad separates wrap on narrow screens.
for (const element of document.querySelectorAll(".arithmatex")) {
  const source = element.textContent.trim()
  const displayMode = source.startsWith("\\[")
  const parts = source.slice(2, -2).split("\\qquad").map((part) => {
    const span = document.createElement("span")
    katex.render(part.trim(), span, { displayMode, throwOnError: false })
    return span
  })
  element.replaceChildren(...parts)
}

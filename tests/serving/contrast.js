// Every text in sight of a page: [contrast with what is behind it, the text, its element], as WCAG 2 defines contrast.
() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  canvas.canvas.width = canvas.canvas.height = 1;
  function rgba(color) {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    const [red, green, blue, alpha] = canvas.getImageData(0, 0, 1, 1).data;
    return [red, green, blue, alpha / 255];
  }
  const over = ([red, green, blue, alpha], below) => [red, green, blue].map((value, i) => value * alpha + below[i] * (1 - alpha));
  function luminance(rgb) {
    const [red, green, blue] = rgb.map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  }
  function opacity(element) {
    let all = 1;
    for (let at = element; at; at = at.parentElement) all *= getComputedStyle(at).opacity;
    return all;
  }
  function behind(element, x, y) {
    const stack = document.elementsFromPoint(x, y); // the topmost first
    let nearest = element; // what takes no pointer is not in the stack
    while (nearest && !stack.includes(nearest)) nearest = nearest.parentElement;
    let color = rgba("Canvas");
    for (const node of stack.slice(stack.indexOf(nearest)).reverse()) {
      const [red, green, blue, alpha] = rgba(getComputedStyle(node).backgroundColor);
      color = over([red, green, blue, alpha * opacity(node)], color);
    }
    return color;
  }
  for (const animation of document.getAnimations()) // what is on its way into the page is there
    if (animation.effect.getComputedTiming().endTime < Infinity) animation.finish();
  const found = [];
  function look(element, text, box, style) {
    const back = behind(element, box.x + box.width / 2, box.y + box.height / 2);
    const [red, green, blue, alpha] = rgba(element.closest("svg") ? style.fill : style.color);
    const front = over([red, green, blue, alpha * opacity(element)], back);
    const [darker, lighter] = [luminance(front), luminance(back)].sort((a, b) => a - b);
    const tag = `${element.tagName.toLowerCase()}.${element.getAttribute("class")}`;
    found.push([(lighter + 0.05) / (darker + 0.05), text.trim().slice(0, 60), tag]);
  }
  for (const element of document.body.querySelectorAll(":not(script, style, noscript)")) {
    if (!element.checkVisibility({ visibilityProperty: true, opacityProperty: true })) continue;
    element.scrollIntoView({ block: "center", inline: "nearest" });
    const range = document.createRange();
    for (const node of element.childNodes) {
      if (node.nodeType !== Node.TEXT_NODE || !node.textContent.trim()) continue;
      range.selectNodeContents(node);
      const box = [...range.getClientRects()].find((box) => box.width > 1 && box.height > 1);
      if (box) look(element, node.textContent, box, getComputedStyle(element));
    }
    const written = element.matches("textarea, input:not([type=checkbox], [type=radio], [type=range])");
    const own = element.getBoundingClientRect();
    if (written && element.value) look(element, element.value, own, getComputedStyle(element));
    else if (written && element.placeholder) look(element, element.placeholder, own, getComputedStyle(element, "::placeholder"));
    for (const pseudo of ["::before", "::after"]) {
      const style = getComputedStyle(element, pseudo);
      if (/^".*\S.*"$/.test(style.content) && style.display !== "none") look(element, style.content, own, style);
    }
  }
  return found;
};

"use strict";

/** An element with properties and children; text is never taken for HTML. */
function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in element && name !== "list") element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

function draw(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function get(id) {
  return document.getElementById(id);
}

/** Sets a text only if it differs: screen readers and selections are left alone. */
function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Keeps one child per item, in order, and does not touch those that stay: focus survives. */
function keep(parent, items, keyOf, build, update) {
  const old = new Map([...parent.children].filter((c) => c.dataset.key).map((c) => [c.dataset.key, c]));
  let place = parent.firstElementChild;
  for (const item of items) {
    const key = String(keyOf(item));
    let child = old.get(key);
    if (child === undefined) {
      child = build(item);
      child.dataset.key = key;
    }
    old.delete(key);
    if (child === place) place = place.nextElementSibling;
    else parent.insertBefore(child, place);
    update(child, item);
  }
  for (const child of old.values()) child.remove();
}

function inMs(ms) {
  if (ms === null || ms === undefined) return "–";
  if (ms >= 1000) return `${(ms / 1000).toPrecision(3)} s`;
  return `${ms >= 100 ? Math.round(ms) : Number(ms.toPrecision(2))} ms`;
}

/** As many digits as one can act on: "< 0.1 %", "4.2 %", "63 %", "99.95 %". */
function inPercent(share) {
  if (share === null || share === undefined) return "–";
  const percent = share * 100;
  if (percent > 0 && percent < 0.1) return "< 0.1 %";
  if (percent > 99 && percent < 100) return `${Math.min(99.99, Number(percent.toFixed(2)))} %`;
  return `${percent < 10 ? Number(percent.toFixed(1)) : Math.round(percent)} %`;
}

/** A number for people: "0.4", "3.1", "12", "1 234", "56.7 k". */
function inCount(number) {
  if (number === null || number === undefined) return "–";
  if (number >= 1e6) return `${(number / 1e6).toPrecision(3)} M`;
  if (number >= 1e4) return `${(number / 1e3).toPrecision(3)} k`;
  if (Number.isInteger(number) || number >= 100) return String(Math.round(number));
  return String(Number(number.toFixed(number < 1 ? 2 : 1)));
}

/** Buttons of which one is chosen; calls back with its value. */
function choice(fieldset, options, chosen, onChosen) {
  fieldset.append(...options.map(([value, text]) => {
    const input = make("input", { type: "radio", name: fieldset.id, checked: value === chosen });
    input.addEventListener("change", () => onChosen(value));
    return make("label", {}, input, make("span", {}, text));
  }));
}

/** Tells a screen reader what has changed. */
function announce(text) {
  say(get("announcer"), text);
}

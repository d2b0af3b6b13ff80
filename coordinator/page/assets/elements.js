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

function inCount(number) {
  if (number === null || number === undefined) return "–";
  if (number >= 1e6) return `${(number / 1e6).toPrecision(3)} M`;
  if (number >= 1e4) return `${(number / 1e3).toPrecision(3)} k`;
  return Number.isInteger(number) ? String(number) : String(Number(number.toPrecision(3)));
}

function inPercent(share) {
  if (share === null || share === undefined) return "–";
  return `${Number((share * 100).toPrecision(share > 0.99 && share < 1 ? 4 : 3))} %`;
}

/** Tells a screen reader what has changed. */
function announce(text) {
  say(get("announcer"), text);
}

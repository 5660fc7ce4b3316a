// The menu of pages on narrow screens, and the scheme of tables.
"use strict";
(() => {
  const button = document.querySelector("button.menu");
  const navigation = document.getElementById("navigation");
  button.addEventListener("click", () => {
    const open = button.getAttribute("aria-expanded") !== "true";
    button.setAttribute("aria-expanded", String(open));
    navigation.classList.toggle("open", open);
  });
  document.documentElement.classList.add("scripted");
  // the library of sorted tables asks for a class, where styles ask for the scheme
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const apply = () => document.documentElement.classList.toggle("dark", dark.matches);
  dark.addEventListener("change", apply);
  apply();
})();

// The menu of pages on narrow screens.
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
})();

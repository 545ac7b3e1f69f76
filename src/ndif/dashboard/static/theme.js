// Runs before the page is painted, so that the page never flashes in the other theme.
const chosen = (() => {
  try {
    return localStorage.getItem("ndif-theme");
  } catch {
    return null;
  }
})();
if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;

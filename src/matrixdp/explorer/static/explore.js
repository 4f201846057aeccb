// Sliders over given values, copying of code, and moving the focus. Everything else is Shiny's.
(function () {
  "use strict";

  function values(range) {
    return JSON.parse(range.dataset.values);
  }

  function show(range) {
    const value = values(range)[range.value];
    const text = value < 1e-3 ? value.toExponential() : String(value);
    range.setAttribute("aria-valuetext", text);
    const output = document.getElementById(range.id + "_output");
    if (output) output.textContent = text;
  }

  class Slider extends Shiny.InputBinding {
    find(scope) {
      return $(scope).find("input.mdp-range");
    }
    getValue(range) {
      return values(range)[range.value];
    }
    setValue(range, value) {
      range.value = Math.max(0, values(range).indexOf(value));
      show(range);
    }
    receiveMessage(range, data) {
      if ("value" in data) this.setValue(range, data.value);
      $(range).trigger("change");
    }
    subscribe(range, callback) {
      show(range);
      $(range).on("input.mdp", function () { show(range); callback(true); });
      $(range).on("change.mdp", function () { show(range); callback(false); });
    }
    unsubscribe(range) {
      $(range).off(".mdp");
    }
    getRatePolicy() {
      return { policy: "debounce", delay: 300 };
    }
  }
  Shiny.inputBindings.register(new Slider(), "matrixdp.slider");

  document.addEventListener("click", function (event) {
    const button = event.target.closest("button.mdp-copy");
    if (!button) return;
    const text = document.getElementById(button.dataset.copies).textContent;
    navigator.clipboard.writeText(text).then(function () {
      button.textContent = "Copied";
      setTimeout(function () { button.textContent = "Copy"; }, 1500);
    });
  });

  // A release is confirmed once: the button is off from the first click on, before the server knows of it.
  document.addEventListener("click", function (event) {
    const button = event.target.closest("button.mdp-once");
    if (button) setTimeout(function () { button.disabled = true; }, 0);
  });

  // Shiny shows the name of an uploaded file in a field without a label.
  document.addEventListener("DOMContentLoaded", function () {
    document.querySelectorAll("input[readonly]").forEach(function (field) {
      field.setAttribute("aria-label", "Name of the uploaded file");
    });
  });

  Shiny.addCustomMessageHandler("mdp-focus", function (message) {
    // after the element has been drawn
    setTimeout(function () {
      const element = document.getElementById(message.id);
      if (element) element.focus();
    }, 150);
  });
})();

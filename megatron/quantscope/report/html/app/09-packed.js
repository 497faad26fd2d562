"use strict";

/* What the file carries as base64 of gzip: the figures, and plotly.js, which is a third of its size so. */

Report.packed = (() => {
  function bytesOf(base64) {
    const text = atob(base64);
    const bytes = new Uint8Array(text.length);
    for (let index = 0; index < text.length; index += 1) bytes[index] = text.charCodeAt(index);
    return bytes;
  }

  function unpacked(id) {
    const packed = bytesOf(document.getElementById(id).textContent.trim());
    return new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip")));
  }

  /* An inline script runs as soon as it is in the document. */
  async function run(id) {
    const script = document.createElement("script");
    script.textContent = await unpacked(id).text();
    document.head.append(script);
  }

  return { bytesOf, json: (id) => unpacked(id).json(), run };
})();

// A browser starts no worker from a file. The theme's search wants one: from a folder it runs in a
// hidden frame instead, which can be spoken to in the same way.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      const inside = frame.contentWindow
      const script = inside.document.createElement("script")
      this.ready = new Promise((done) => (script.onload = done))
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
      this.inside = inside
      script.src = url
      inside.document.body.append(script)
    }
    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })))
    }
  }
  window.Worker = window.IFrameWorker
}

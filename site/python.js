// Python in a worker: questions and answers, one after the other.
const WAITS = 400; // milliseconds until a question counts as slow, and can be stopped

export class Python {
  /** @param {string} program "playground" or "cells" @param {(slow: boolean) => void} slow called when a question takes long, and at its end */
  constructor(program, slow) {
    this.program = program;
    this.slow = slow;
    this.number = 0; // of the question that is open
    /** @type {(answer: any) => void} */ this.resolve = () => {};
    /** @type {(error: Error) => void} */ this.reject = () => {};
    this.worker = this.begin();
    this.last = this.answer();
  }

  /** Return a worker that has the page's content security policy, as one from a blob does. */
  begin() {
    const script = new URL("worker.js", import.meta.url).href;
    const source = `import { start } from ${JSON.stringify(script)}; start(${JSON.stringify(this.program)});`;
    const address = URL.createObjectURL(new Blob([source], { type: "text/javascript" }));
    const worker = new Worker(address, { type: "module" });
    worker.addEventListener("message", ({ data }) => this.receive(String(data)));
    worker.addEventListener("error", () => this.reject(new Error("Python could not be loaded; reload the page.")));
    return worker;
  }

  /** Return what the worker answers next. @returns {Promise<any>} */
  answer() {
    return new Promise((resolve, reject) => {
      this.resolve = resolve;
      this.reject = reject;
    });
  }

  /** Take the answer to the open question, and nothing else that a reader's code has sent. @param {string} data */
  receive(data) {
    const [, number, text] = /^(\d+) (.*)$/s.exec(data) ?? [];
    if (Number(number) !== this.number) return;
    try {
      const answer = JSON.parse(text);
      // Later, so that the page can answer a click between reading a large answer and drawing it.
      if (typeof answer === "object" && answer !== null) setTimeout(this.resolve, 0, answer);
    } catch {
      // not an answer of ours
    }
  }

  /** Return the answer to a question, or null if it was stopped. @param {object} question @returns {Promise<any>} */
  ask(question) {
    const { worker } = this;
    const turn = async () => {
      if (worker !== this.worker) return null;
      this.number += 1;
      const timer = setTimeout(() => this.slow(true), WAITS);
      worker.postMessage(`${this.number} ${JSON.stringify(question)}`);
      const found = await this.answer();
      clearTimeout(timer);
      this.slow(false);
      return found;
    };
    this.last = this.last.then(turn);
    return this.last;
  }

  /** End what runs, and start again without any names. */
  stop() {
    this.worker.terminate();
    this.resolve(null);
    this.number = 0;
    this.worker = this.begin();
    this.last = this.answer();
  }
}

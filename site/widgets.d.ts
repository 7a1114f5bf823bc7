export { mount } from "../ppedu/view/js/controls.js";

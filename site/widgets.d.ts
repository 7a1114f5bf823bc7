export { mount } from "../ppedu/view/js/mount.js";

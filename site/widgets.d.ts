export { mount } from "../ppedu/view/js/mount.js";
export { savedName } from "../ppedu/view/js/saving.js";

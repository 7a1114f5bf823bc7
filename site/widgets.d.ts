export { mount } from "../ppedu/view/js/mount.js";
export { recall, setIn } from "../ppedu/view/js/recall.js";
export { savedName } from "../ppedu/view/js/saving.js";
export { tableOf } from "../ppedu/view/js/widgets.js";
export { tell } from "../ppedu/view/js/why.js";

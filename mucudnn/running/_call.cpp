// The hot path of a tuned call in eager code, as an extension of Python: what is asked of the operands, the look-up of
// the recipe, and the call of a bound recipe. In Python each of these is several times as dear as its work, most of all in
// a training step, where little of the interpreter is in the caches when a convolution comes.
//
// It knows torch only by the objects that Python hands over, never by torch's headers, so that it works with any torch.
// It serves the common case alone: whatever is unusual goes back to Python, which does the same for all cases.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace {

class Ref {  // owns a reference, or none
 public:
  Ref() = default;
  explicit Ref(PyObject* owned) : object_(owned) {}
  Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Ref& operator=(Ref&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  Ref(const Ref&) = delete;
  ~Ref() { Py_XDECREF(object_); }
  static Ref borrowed(PyObject* object) {
    Py_XINCREF(object);
    return Ref(object);
  }
  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_ = nullptr;
};

// What torch has, handed over once by `set_up`; kept as long as the process lives.
struct Torch {
  PyTypeObject *tensor, *parameter;
  PyObject *get_num_threads, *empty_strided;
  PyObject* watching;       // a tuple of functions: any true result means that somebody watches
  PyObject* tracing_state;  // a function: a result other than None means the same
  PyObject* forward_ad;     // the dictionary of a module, with the level of forward-mode derivatives
  PyObject* kept_workspace;  // of each thread: has a buffer, or None
  PyObject* is_grad_enabled;
  PyObject* operations;  // Operation's members, in the order below
} torch;

PyObject* values_in_python = nullptr;  // does what `values` does, for all cases
PyObject* dimensions_of_bias = nullptr;  // those of dy over which the gradient of the bias is a sum

struct Names {
  PyObject *shape, *stride, *dtype, *device, *is_nested, *is_neg, *data_ptr, *is_contiguous, *zero, *numel;
  PyObject *workspace, *buffer, *bound, *current_level, *memory_format;
  PyObject *recipes, *rest, *saved_tensors, *needs_input_grad, *sum;
} names;

using Entry = int64_t (*)(const void* stage, void* x, void* w, void* y, void* bias, void* prepared, void* scratch);

struct Stage {
  Entry entry;
  const void* argument;
  Py_ssize_t prepared;  // where its prepared bytes begin in the workspace
};

enum Operation : long { FORWARD, BACKWARD_DATA, BACKWARD_FILTER };

struct Bound {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  long operation;
  std::vector<Stage>* stages;
  Py_ssize_t scratch, workspace_bytes;
  PyObject* memory_format;  // of all tensors
  PyObject* new_arguments;  // shape, strides, dtype and device of the result
  PyObject* new_names;      // of the last two
  PyObject* otherwise;      // the same in Python, for all cases
};

PyTypeObject* bound_type = nullptr;

// Of a tensor whose values are there: without it, or with an error, it is not for us.
bool has_address(PyObject* tensor, void*& address) {
  const Ref number(PyObject_CallMethodNoArgs(tensor, names.data_ptr));
  if (!number) return false;
  address = PyLong_AsVoidPtr(number.get());
  return !PyErr_Occurred();
}

// 1, 0, or -1 with an error.
int truth(const Ref& value) { return value ? PyObject_IsTrue(value.get()) : -1; }

int is_dense(const Bound& bound, PyObject* tensor) {
  PyObject* const arguments[] = {tensor, bound.memory_format};
  const Ref keywords(PyTuple_Pack(1, names.memory_format));
  return keywords ? truth(Ref(PyObject_VectorcallMethod(names.is_contiguous, arguments, 1, keywords.get()))) : -1;
}

// This thread's workspace; none without an error where it is too small, or not there.
Ref workspace_of(const Bound& bound) {
  const Ref kept(PyObject_GetAttr(torch.kept_workspace, names.workspace));
  if (!kept) return Ref();
  Ref buffer(PyObject_GetAttr(kept.get(), names.buffer));
  if (!buffer || buffer.get() == Py_None) return Ref();
  const Ref size(PyObject_CallMethodNoArgs(buffer.get(), names.numel));
  if (!size || PyLong_AsSsize_t(size.get()) < bound.workspace_bytes) return Ref();
  return buffer;
}

Ref new_result(const Bound& bound) {
  PyObject* arguments[4];
  for (Py_ssize_t i = 0; i < 4; ++i) arguments[i] = PyTuple_GET_ITEM(bound.new_arguments, i);
  Ref result(PyObject_Vectorcall(torch.empty_strided, arguments, 2, bound.new_names));
  if (result && bound.operation == BACKWARD_FILTER && !Ref(PyObject_CallMethodNoArgs(result.get(), names.zero)))
    return Ref();
  return result;
}

PyObject* in_python(const Bound& bound, PyObject* x, PyObject* w, PyObject* third) {
  if (PyErr_Occurred()) return nullptr;
  PyObject* const arguments[] = {x, w, third};
  return PyObject_Vectorcall(bound.otherwise, arguments, 3, nullptr);
}

// third: the bias or None in FORWARD, else dy.
PyObject* run(const Bound& bound, PyObject* x, PyObject* w, PyObject* third) {
  PyObject* const reads[] = {bound.operation == BACKWARD_DATA ? nullptr : x,
                             bound.operation == BACKWARD_FILTER ? nullptr : w,
                             bound.operation == FORWARD ? nullptr : third};
  for (PyObject* tensor : reads)
    if (tensor && is_dense(bound, tensor) != 1) return in_python(bound, x, w, third);
  const bool has_bias = bound.operation == FORWARD && third != Py_None;
  if (has_bias && truth(Ref(PyObject_CallMethodNoArgs(third, names.is_contiguous))) != 1)
    return in_python(bound, x, w, third);
  const Ref workspace = workspace_of(bound);
  if (!workspace) return in_python(bound, x, w, third);
  Ref result = new_result(bound);
  if (!result) return nullptr;
  void *of_x, *of_w, *of_y, *of_bias = nullptr, *begin;
  if (!has_address(reads[0] ? x : result.get(), of_x) || !has_address(reads[1] ? w : result.get(), of_w) ||
      !has_address(reads[2] ? third : result.get(), of_y) || (has_bias && !has_address(third, of_bias)) ||
      !has_address(workspace.get(), begin))
    return nullptr;
  char* const start = static_cast<char*>(begin);
  bool is_refused = false;
  Py_BEGIN_ALLOW_THREADS;
  for (const Stage& stage : *bound.stages)
    is_refused = is_refused || stage.entry(stage.argument, of_x, of_w, of_y, of_bias, start + stage.prepared,
                                           start + bound.scratch) < 0;
  Py_END_ALLOW_THREADS;
  return is_refused ? in_python(bound, x, w, third) : result.release();  // Python raises what was refused
}

// ---- what Python calls ---------------------------------------------------------------------------------------------

PyObject* bound_call(PyObject* self, PyObject* const* arguments, size_t flagged_count, PyObject*) {
  if (PyVectorcall_NARGS(flagged_count) != 3) return PyErr_Format(PyExc_TypeError, "it takes x, w, and bias or dy");
  return run(*reinterpret_cast<Bound*>(self), arguments[0], arguments[1], arguments[2]);
}

PyObject* bound_new(PyTypeObject* type, PyObject* arguments, PyObject*) {
  long operation;
  PyObject *stages, *memory_format, *new_arguments, *new_names, *otherwise;
  Py_ssize_t scratch, workspace_bytes;
  if (!PyArg_ParseTuple(arguments, "lO!nnOO!O!O", &operation, &PyTuple_Type, &stages, &scratch, &workspace_bytes,
                        &memory_format, &PyTuple_Type, &new_arguments, &PyTuple_Type, &new_names, &otherwise))
    return nullptr;
  if (PyTuple_GET_SIZE(new_arguments) != 4 || PyTuple_GET_SIZE(new_names) != 2)
    return PyErr_Format(PyExc_ValueError, "the result has shape, strides, dtype and device, the last two by name");
  Ref owned(type->tp_alloc(type, 0));
  if (!owned) return nullptr;
  Bound& bound = *reinterpret_cast<Bound*>(owned.get());
  bound.vectorcall = bound_call;
  bound.operation = operation;
  bound.stages = new std::vector<Stage>();
  bound.scratch = scratch;
  bound.workspace_bytes = workspace_bytes;
  bound.memory_format = Py_NewRef(memory_format);
  bound.new_arguments = Py_NewRef(new_arguments);
  bound.new_names = Py_NewRef(new_names);
  bound.otherwise = Py_NewRef(otherwise);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(stages); ++i) {
    Py_ssize_t entry, argument, prepared;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(stages, i), "nnn", &entry, &argument, &prepared)) return nullptr;
    bound.stages->push_back({reinterpret_cast<Entry>(entry), reinterpret_cast<const void*>(argument), prepared});
  }
  return owned.release();
}

void bound_dealloc(PyObject* self) {
  Bound& bound = *reinterpret_cast<Bound*>(self);
  PyTypeObject* type = Py_TYPE(self);
  delete bound.stages;
  for (PyObject* object : {bound.memory_format, bound.new_arguments, bound.new_names, bound.otherwise})
    Py_XDECREF(object);
  type->tp_free(self);
  Py_DECREF(type);
}

bool append(PyObject* key, Py_ssize_t& size, PyObject* owned) {
  if (!owned) return false;
  PyTuple_SET_ITEM(key, size++, owned);
  return true;
}

bool append_pair(PyObject* key, Py_ssize_t& size, PyObject* pair) {
  for (Py_ssize_t i = 0; i < 2; ++i)
    if (!append(key, size, PySequence_GetItem(pair, i))) return false;
  return true;
}

bool append_layout(PyObject* key, Py_ssize_t& size, PyObject* tensor) {
  return append(key, size, PyObject_GetAttr(tensor, names.shape)) &&
         append(key, size, PyObject_CallMethodNoArgs(tensor, names.stride)) &&
         append(key, size, PyObject_GetAttr(tensor, names.dtype)) &&
         append(key, size, PyObject_GetAttr(tensor, names.device));
}

PyObject* layout_of_third(PyObject* third) {
  if (third == Py_None) return Py_NewRef(Py_None);
  const Ref shape(PyObject_GetAttr(third, names.shape));
  if (!shape) return nullptr;
  const Ref dtype(PyObject_GetAttr(third, names.dtype));
  if (!dtype) return nullptr;
  const Ref device(PyObject_GetAttr(third, names.device));
  return device ? PyTuple_Pack(3, shape.get(), dtype.get(), device.get()) : nullptr;
}

constexpr Py_ssize_t KEY_SIZE = 18;

// As `recipe_of` in Python makes it. arguments: operation, x, w, third, stride, padding, dilation, groups.
Ref key_of(PyObject* const* arguments) {
  Ref key(PyTuple_New(KEY_SIZE));
  if (!key) return Ref();
  Py_ssize_t size = 0;
  PyObject* to = key.get();
  const bool is_whole =
      append(to, size, Py_NewRef(arguments[0])) && append_pair(to, size, arguments[4]) &&
      append_pair(to, size, arguments[5]) && append_pair(to, size, arguments[6]) &&
      append(to, size, Py_NewRef(arguments[7])) && append_layout(to, size, arguments[1]) &&
      append_layout(to, size, arguments[2]) && append(to, size, layout_of_third(arguments[3])) &&
      append(to, size, PyObject_CallNoArgs(torch.get_num_threads));
  return is_whole ? std::move(key) : Ref();
}

PyObject* run_known(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 9 || !PyDict_Check(arguments[0]))
    return PyErr_Format(PyExc_TypeError, "it takes the recipes, and the arguments of a call");
  for (Py_ssize_t i = 5; i < 8; ++i)
    if (PySequence_Size(arguments[i]) != 2) return PyErr_Occurred() ? nullptr : Py_NewRef(Py_NotImplemented);
  const Ref key = key_of(arguments + 1);
  if (!key) return nullptr;
  PyObject* found = PyDict_GetItemWithError(arguments[0], key.get());
  if (!found) return PyErr_Occurred() ? nullptr : Py_NewRef(Py_NotImplemented);
  const Ref recipe = Ref::borrowed(found);  // another thread may forget it meanwhile
  if (found == Py_None) return Py_NewRef(Py_None);
  const Ref bound(PyObject_GetAttr(found, names.bound));
  if (!bound) return nullptr;
  if (Py_TYPE(bound.get()) != bound_type) return Py_NewRef(Py_NotImplemented);
  return run(*reinterpret_cast<Bound*>(bound.get()), arguments[2], arguments[3], arguments[4]);
}

// 1: dense values in memory, as they are, and no subclass; 0: something else; -1: an error.
int is_plain(PyObject* tensor) {
  if (Py_TYPE(tensor) != torch.tensor && Py_TYPE(tensor) != torch.parameter) return 0;
  const int is_nested = truth(Ref(PyObject_GetAttr(tensor, names.is_nested)));
  if (is_nested) return is_nested < 0 ? -1 : 0;
  const int is_neg = truth(Ref(PyObject_CallMethodNoArgs(tensor, names.is_neg)));
  if (is_neg) return is_neg < 0 ? -1 : 0;
  void* address = nullptr;
  if (has_address(tensor, address)) return address != nullptr;  // null: empty, or zeros that are nowhere
  if (!PyErr_ExceptionMatches(PyExc_RuntimeError)) return -1;
  PyErr_Clear();  // sparse tensors, wrappers of transforms: they have no address
  return 0;
}

int is_watched() {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(torch.watching); ++i) {
    const int watches = truth(Ref(PyObject_CallNoArgs(PyTuple_GET_ITEM(torch.watching, i))));
    if (watches) return watches;
  }
  const Ref tracing(PyObject_CallNoArgs(torch.tracing_state));
  if (!tracing) return -1;
  PyObject* level = PyDict_GetItemWithError(torch.forward_ad, names.current_level);
  if (!level) return -1;
  const long number = PyLong_AsLong(level);
  if (PyErr_Occurred()) return -1;
  return tracing.get() != Py_None || number >= 0;
}

// 1, 0, or -1 with an error. third: None, or a tensor.
int are_eager(PyObject* x, PyObject* w, PyObject* third) {
  const int watched = is_watched();
  if (watched) return watched < 0 ? -1 : 0;
  for (PyObject* tensor : {x, w, third}) {
    const int plain = tensor == Py_None && tensor == third ? 1 : is_plain(tensor);
    if (plain != 1) return plain;
  }
  return 1;
}

PyObject* is_eager(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 3) return PyErr_Format(PyExc_TypeError, "it takes x, w, and bias or dy");
  const int eager = are_eager(arguments[0], arguments[1], arguments[2]);
  return eager < 0 ? nullptr : PyBool_FromLong(eager);
}

// rest: stride, padding, dilation, groups and choices.
PyObject* values_of(PyObject* operation, PyObject* x, PyObject* w, PyObject* third, PyObject* rest) {
  if (!PyTuple_Check(rest) || PyTuple_GET_SIZE(rest) != 5)
    return PyErr_Format(PyExc_TypeError, "the rest is stride, padding, dilation, groups and choices");
  PyObject* given[9] = {nullptr, operation, x, w, third};
  for (Py_ssize_t i = 0; i < 4; ++i) given[5 + i] = PyTuple_GET_ITEM(rest, i);
  PyObject* choices = PyTuple_GET_ITEM(rest, 4);
  const Ref recipes(PyObject_GetAttr(choices, names.recipes));
  if (!recipes) return nullptr;
  given[0] = recipes.get();
  Ref result(run_known(nullptr, given, 9));
  if (result && result.get() != Py_None && result.get() != Py_NotImplemented) return result.release();
  PyErr_Clear();  // for lack of memory, say: Python tries it again, and knows what to do
  PyObject* again[9];
  for (Py_ssize_t i = 0; i < 8; ++i) again[i] = given[i + 1];
  again[8] = choices;
  return PyObject_Vectorcall(values_in_python, again, 9, nullptr);
}

PyObject* values(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 5) return PyErr_Format(PyExc_TypeError, "it takes operation, x, w, bias or dy, and the rest");
  return values_of(arguments[0], arguments[1], arguments[2], arguments[3], arguments[4]);
}

PyObject* gradients(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 2) return PyErr_Format(PyExc_TypeError, "it takes ctx and dy");
  PyObject *ctx = arguments[0], *dy = arguments[1];
  const Ref saved(PyObject_GetAttr(ctx, names.saved_tensors));
  if (!saved) return nullptr;  // they were changed in place, say, or the graph is gone
  const Ref rest(PyObject_GetAttr(ctx, names.rest));
  if (!rest) return nullptr;
  const Ref needed(PyObject_GetAttr(ctx, names.needs_input_grad));
  if (!needed) return nullptr;
  if (!PyTuple_Check(saved.get()) || PyTuple_GET_SIZE(saved.get()) != 2 || !PyTuple_Check(needed.get()) ||
      PyTuple_GET_SIZE(needed.get()) != 4)
    return PyErr_Format(PyExc_TypeError, "ctx is not that of TunedConv2d");
  PyObject *x = PyTuple_GET_ITEM(saved.get(), 0), *w = PyTuple_GET_ITEM(saved.get(), 1);
  const int is_recorded = truth(Ref(PyObject_CallNoArgs(torch.is_grad_enabled)));
  if (is_recorded) return is_recorded < 0 ? nullptr : Py_NewRef(Py_NotImplemented);
  const int eager = are_eager(x, w, dy);
  if (eager != 1) return eager < 0 ? nullptr : Py_NewRef(Py_NotImplemented);
  Ref results[4];
  for (Py_ssize_t i = 0; i < 4; ++i) {
    if (PyTuple_GET_ITEM(needed.get(), i) != Py_True)
      results[i] = Ref::borrowed(Py_None);
    else if (i == 2)
      results[i] = Ref(PyObject_CallMethodOneArg(dy, names.sum, dimensions_of_bias));
    else
      results[i] = Ref(values_of(PyTuple_GET_ITEM(torch.operations, i + 1), x, w, dy, rest.get()));
    if (!results[i]) return nullptr;
  }
  return PyTuple_Pack(4, results[0].get(), results[1].get(), results[2].get(), results[3].get());
}

PyObject* set_values_in_python(PyObject*, PyObject* function) {
  Py_XSETREF(values_in_python, Py_NewRef(function));
  Py_RETURN_NONE;
}

PyObject* set_up(PyObject*, PyObject* arguments) {
  PyObject *tensor, *parameter, *get_num_threads, *empty_strided, *watching, *tracing_state, *forward_ad, *workspace;
  PyObject *is_grad_enabled, *operations;
  if (!PyArg_ParseTuple(arguments, "O!O!OOO!OO!OOO!", &PyType_Type, &tensor, &PyType_Type, &parameter,
                        &get_num_threads, &empty_strided, &PyTuple_Type, &watching, &tracing_state, &PyDict_Type,
                        &forward_ad, &workspace, &is_grad_enabled, &PyTuple_Type, &operations))
    return nullptr;
  torch = {reinterpret_cast<PyTypeObject*>(Py_NewRef(tensor)),
           reinterpret_cast<PyTypeObject*>(Py_NewRef(parameter)),
           Py_NewRef(get_num_threads),
           Py_NewRef(empty_strided),
           Py_NewRef(watching),
           Py_NewRef(tracing_state),
           Py_NewRef(forward_ad),
           Py_NewRef(workspace),
           Py_NewRef(is_grad_enabled),
           Py_NewRef(operations)};
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"set_up", set_up, METH_VARARGS, "Hand over what torch has."},
    {"is_eager", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(is_eager)), METH_FASTCALL,
     "Tell whether nobody watches, and x, w and third are plain."},
    {"run_known", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(run_known)), METH_FASTCALL,
     "Run a call whose recipe is known and bound; None: torch's own runs it; NotImplemented: ask in Python."},
    {"values", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(values)), METH_FASTCALL,
     "Compute without autograd: operation, x, w, third, and the rest of the call."},
    {"gradients", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(gradients)), METH_FASTCALL,
     "Compute the gradients of a convolution; NotImplemented where they are recorded, or not eager."},
    {"set_values_in_python", set_values_in_python, METH_O, "Hand over what does the same as values, for all cases."},
    {nullptr, nullptr, 0, nullptr},
};

PyMemberDef bound_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Bound, vectorcall), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyType_Slot bound_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(bound_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(bound_dealloc)},
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {Py_tp_members, bound_members},
    {0, nullptr},
};

PyType_Spec bound_spec = {"mucudnn.running._call.Bound", sizeof(Bound), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL, bound_slots};

PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT, "_call", "The hot path of a tuned call.", -1, methods, nullptr, nullptr, nullptr, nullptr};

bool intern_names() {
  const std::pair<PyObject**, const char*> all[] = {
      {&names.shape, "shape"},
      {&names.stride, "stride"},
      {&names.dtype, "dtype"},
      {&names.device, "device"},
      {&names.is_nested, "is_nested"},
      {&names.is_neg, "is_neg"},
      {&names.data_ptr, "data_ptr"},
      {&names.is_contiguous, "is_contiguous"},
      {&names.zero, "zero_"},
      {&names.numel, "numel"},
      {&names.workspace, "workspace"},
      {&names.buffer, "buffer"},
      {&names.bound, "bound"},
      {&names.current_level, "_current_level"},
      {&names.memory_format, "memory_format"},
      {&names.recipes, "recipes"},
      {&names.rest, "rest"},
      {&names.saved_tensors, "saved_tensors"},
      {&names.needs_input_grad, "needs_input_grad"},
      {&names.sum, "sum"},
  };
  for (const auto& [name, text] : all)
    if (!(*name = PyUnicode_InternFromString(text))) return false;
  return true;
}

}  // namespace

PyMODINIT_FUNC PyInit__call() {
  if (!intern_names()) return nullptr;
  dimensions_of_bias = Py_BuildValue("(iii)", 0, 2, 3);
  if (!dimensions_of_bias) return nullptr;
  bound_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&bound_spec));
  if (!bound_type) return nullptr;
  Ref module(PyModule_Create(&module_definition));
  if (!module || PyModule_AddObjectRef(module.get(), "Bound", reinterpret_cast<PyObject*>(bound_type)) < 0)
    return nullptr;
  return module.release();
}

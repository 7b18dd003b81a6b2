// The hot path of a tuned call in eager code, as a Python extension: the checks of the operands, the lookup of the
// executable, and the call of a bound executable. In Python each of these costs several times its useful work, most of
// all in a training step, where little of the interpreter is in the caches when a convolution is called.
//
// It knows torch only through the objects that Python passes in, not through torch's headers (tensors.h). It handles only
// the common case; every other call goes back to Python, which handles all cases.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "tensors.h"

namespace {

// ---- objects from Python --------------------------------------------------------------------------------------------

// Objects of torch, passed in once by `set_up` and kept for the life of the process.
struct Torch {
  PyTypeObject *tensor, *parameter;
  int (*describe)(void* tensor, Described* out);
  PyObject *get_num_threads, *empty_strided, *empty_like;
  PyObject* watching;       // a tuple of functions: any true result means that calls are being watched
  PyObject* tracing_state;  // a function: a result other than None means the same
  PyObject* forward_ad;     // the dictionary of a module, with the level of forward-mode differentiation
  PyObject* kept_workspace;  // thread-local: has a buffer, or None
  PyObject* is_grad_enabled;
  PyObject* operations;  // Operation's members, in the order below
  PyObject* unusual;     // a tuple of names of methods: any true result means that a tensor is not plain
} torch;

PyObject* values_in_python = nullptr;  // a function that does the same as `values`, for all cases
PyObject* dimensions_of_bias = nullptr;  // the dimensions of dy to sum over for the gradient of the bias

struct Names {
  PyObject *workspace, *buffer, *bound, *current_level, *executables, *rest, *saved_tensors, *needs_input_grad, *sum, *contiguous,
      *requires_grad;
} names;

using Entry = int64_t (*)(const void* stage, void* x, void* w, void* y, void* bias, void* prepared, void* scratch,
                          const void* epilogue);

struct Stage {
  Entry entry;
  const void* argument;
  Py_ssize_t prepared;  // offset of its prepared bytes in the workspace
};

enum Operation : long { FORWARD, BACKWARD_DATA, BACKWARD_FILTER };

struct Bound {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  long operation;
  std::vector<Stage>* stages;
  Py_ssize_t scratch, workspace_bytes;
  int is_channels_last;     // all tensors are channels-last; otherwise contiguous
  PyObject* new_arguments;  // shape, strides, dtype and device of the result
  PyObject* new_names;      // keyword names of the last two
  PyObject* new_large;      // a function that allocates a large result, or None
  PyObject* otherwise;      // the same call in Python, for all cases
};

PyTypeObject* bound_type = nullptr;

// Return 1, 0, or -1 with an exception set.
int truth(const Ref& value) { return value ? PyObject_IsTrue(value.get()) : -1; }

// Return whether a tensor is of torch's own class and can be described; sparse ones and wrappers of transforms cannot.
bool describe(PyObject* tensor, Described& out) {
  if (Py_TYPE(tensor) != torch.tensor && Py_TYPE(tensor) != torch.parameter) return false;
  if (torch.describe(tensor, &out) == 0) return out.byte_offset == 0;
  PyErr_Clear();
  return false;
}

// Return whether a tensor is dense as torch defines it: strides of dimensions of size 1 do not matter unless `exactly`.
bool is_dense(const Described& tensor, bool is_channels_last, bool exactly = false) {
  constexpr int32_t INNERMOST_FIRST[] = {1, 3, 2, 0};
  if (is_channels_last && tensor.dims != 4) return false;
  int64_t stride = 1;
  for (int32_t i = 0; i < tensor.dims; ++i) {
    const int32_t dim = is_channels_last ? INNERMOST_FIRST[i] : tensor.dims - 1 - i;
    if ((exactly || tensor.shape[dim] != 1) && tensor.strides[dim] != stride) return false;
    stride *= tensor.shape[dim];
  }
  return true;
}

// The operands of a call. third: the bias or None in FORWARD, otherwise dy.
struct Operands {
  PyObject *x, *w, *third;
  Described of_x, of_w, of_third = {};

  Operands(PyObject* x, PyObject* w, PyObject* third) : x(x), w(w), third(third) {}
  bool has_third() const { return third != Py_None; }
  bool describe_all() { return describe(x, of_x) && describe(w, of_w) && (!has_third() || describe(third, of_third)); }
};

// Return and describe this thread's workspace; empty, without an exception, if it is too small or missing.
Ref workspace_of(const Bound& bound, Described& of_workspace) {
  const Ref kept(PyObject_GetAttr(torch.kept_workspace, names.workspace));
  if (!kept) return Ref();
  Ref buffer(PyObject_GetAttr(kept.get(), names.buffer));
  if (!buffer || !describe(buffer.get(), of_workspace)) return Ref();
  return of_workspace.elements() < bound.workspace_bytes ? Ref() : std::move(buffer);
}

// Allocate and describe the result; in BACKWARD_FILTER it is zeroed, since the algorithms add to it. A gradient is
// allocated like its operand if possible: torch parses one tensor faster than two tuples and two keywords.
Ref new_result(const Bound& bound, const Operands& operands, Described& of_result) {
  const bool is_of_x = bound.operation == BACKWARD_DATA;
  const Described& alike = is_of_x ? operands.of_x : operands.of_w;
  Ref result;
  if (bound.new_large != Py_None) {
    result = Ref(PyObject_CallNoArgs(bound.new_large));
  } else if (bound.operation != FORWARD && is_dense(alike, bound.is_channels_last, true)) {
    result = Ref(PyObject_CallOneArg(torch.empty_like, is_of_x ? operands.x : operands.w));
  } else {
    PyObject* arguments[4];
    for (Py_ssize_t i = 0; i < 4; ++i) arguments[i] = PyTuple_GET_ITEM(bound.new_arguments, i);
    result = Ref(PyObject_Vectorcall(torch.empty_strided, arguments, 2, bound.new_names));
  }
  if (!result || !describe(result.get(), of_result)) return Ref();
  if (bound.operation == BACKWARD_FILTER)
    std::memset(of_result.data, 0, size_t(of_result.elements()) * of_result.dtype.bits / 8);
  return result;
}

PyObject* in_python(const Bound& bound, const Operands& operands) {
  if (PyErr_Occurred()) return nullptr;
  PyObject* const arguments[] = {operands.x, operands.w, operands.third};
  return PyObject_Vectorcall(bound.otherwise, arguments, 3, nullptr);
}

// Run a call. operands: described, with the shapes that the executable was bound for. Return null, with or without an
// exception, if Python has to run the call.
PyObject* run_dense(const Bound& bound, const Operands& operands) {
  const bool is_forward = bound.operation == FORWARD;
  const bool reads_x = bound.operation != BACKWARD_DATA, reads_w = bound.operation != BACKWARD_FILTER;
  if ((reads_x && !is_dense(operands.of_x, bound.is_channels_last)) ||
      (reads_w && !is_dense(operands.of_w, bound.is_channels_last)) ||
      (operands.has_third() && !is_dense(operands.of_third, bound.is_channels_last && !is_forward)))
    return nullptr;
  Described of_workspace, of_result;
  const Ref workspace = workspace_of(bound, of_workspace);  // held, since another thread may release it meanwhile
  if (!workspace) return nullptr;
  Ref result = new_result(bound, operands, of_result);
  if (!result) return nullptr;
  char* const start = static_cast<char*>(of_workspace.data);
  void* const of_x = reads_x ? operands.of_x.data : of_result.data;
  void* const of_w = reads_w ? operands.of_w.data : of_result.data;
  void* const of_y = is_forward ? of_result.data : operands.of_third.data;
  void* const of_bias = is_forward ? operands.of_third.data : nullptr;
  bool is_refused = false;
  Py_BEGIN_ALLOW_THREADS;
  for (const Stage& stage : *bound.stages)
    is_refused = is_refused || stage.entry(stage.argument, of_x, of_w, of_y, of_bias,
                                           start + stage.prepared, start + bound.scratch, nullptr) < 0;
  Py_END_ALLOW_THREADS;
  return is_refused ? nullptr : result.release();  // Python repeats the call and raises the error
}

PyObject* run(const Bound& bound, Operands& operands) {
  Ref dense;  // a contiguous dy: it may be expanded, as after a sum
  if (bound.operation != FORWARD && !bound.is_channels_last && !is_dense(operands.of_third, false)) {
    dense = Ref(PyObject_CallMethodNoArgs(operands.third, names.contiguous));
    if (!dense || !describe(dense.get(), operands.of_third)) return in_python(bound, operands);
    operands.third = dense.get();
  }
  PyObject* result = run_dense(bound, operands);
  return result ? result : in_python(bound, operands);
}

// ---- what Python calls ---------------------------------------------------------------------------------------------

PyObject* bound_call(PyObject* self, PyObject* const* arguments, size_t flagged_count, PyObject*) {
  if (PyVectorcall_NARGS(flagged_count) != 3) return PyErr_Format(PyExc_TypeError, "it takes x, w, and bias or dy");
  const Bound& bound = *reinterpret_cast<Bound*>(self);
  Operands operands(arguments[0], arguments[1], arguments[2]);
  return operands.describe_all() ? run(bound, operands) : in_python(bound, operands);
}

PyObject* bound_new(PyTypeObject* type, PyObject* arguments, PyObject*) {
  long operation;
  PyObject *stages, *new_arguments, *new_names, *new_large, *otherwise;
  Py_ssize_t scratch, workspace_bytes;
  int is_channels_last;
  if (!PyArg_ParseTuple(arguments, "lO!nnpO!O!OO", &operation, &PyTuple_Type, &stages, &scratch, &workspace_bytes,
                        &is_channels_last, &PyTuple_Type, &new_arguments, &PyTuple_Type, &new_names,
                        &new_large, &otherwise))
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
  bound.is_channels_last = is_channels_last;
  bound.new_large = Py_NewRef(new_large);
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
  for (PyObject* object : {bound.new_arguments, bound.new_names, bound.new_large, bound.otherwise}) Py_XDECREF(object);
  type->tp_free(self);
  Py_DECREF(type);
}

// The key of an executable: all that decides how a call runs on the CPU, as numbers.
class Key {
 public:
  void add(int64_t number) { numbers_[size_++] = number; }

  // Return false, without an exception, if it is not a pair of integers.
  bool add_pair(PyObject* pair) {
    if (!PyTuple_Check(pair) && !PyList_Check(pair)) return false;
    return PySequence_Fast_GET_SIZE(pair) == 2 && add_number(PySequence_Fast_GET_ITEM(pair, 0)) &&
           add_number(PySequence_Fast_GET_ITEM(pair, 1));
  }

  bool add_number(PyObject* object) {
    const int64_t number = PyLong_Check(object) ? PyLong_AsLongLong(object) : -1;
    if (number == -1) PyErr_Clear();
    add(number);
    return number >= 0;
  }

  bool add_tensor(const Described& tensor, bool with_strides) {
    if (tensor.device_type != ON_CPU || tensor.dims > MOST_DIMS) return false;
    add(tensor.dims);
    add(int64_t(tensor.dtype.code) << 32 | int64_t(tensor.dtype.bits) << 16 | tensor.dtype.lanes);
    for (int32_t i = 0; i < tensor.dims; ++i) add(tensor.shape[i]);
    for (int32_t i = 0; with_strides && i < tensor.dims; ++i) add(tensor.strides[i]);
    return true;
  }

  PyObject* bytes() const {
    return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(numbers_), size_ * sizeof(int64_t));
  }

 private:
  static constexpr int32_t MOST_DIMS = 4;
  int64_t numbers_[48];  // 10, and up to 10 per tensor
  size_t size_ = 0;
};

// Return a call's key; empty, without an exception, if Python must run it. rest: stride, padding, dilation and groups.
Ref key_of(PyObject* operation, const Operands& operands, PyObject* const* rest) {
  Key key;
  int64_t number = 0;
  while (number < 3 && PyTuple_GET_ITEM(torch.operations, number) != operation) ++number;
  key.add(number);
  key.add(operands.has_third());
  if (!key.add_pair(rest[0]) || !key.add_pair(rest[1]) || !key.add_pair(rest[2]) || !key.add_number(rest[3]) ||
      !key.add_tensor(operands.of_x, true) || !key.add_tensor(operands.of_w, true) ||
      (operands.has_third() && !key.add_tensor(operands.of_third, false)))
    return Ref();
  const Ref threads(PyObject_CallNoArgs(torch.get_num_threads));
  return threads && key.add_number(threads.get()) ? Ref(key.bytes()) : Ref();
}

constexpr Py_ssize_t CALL_SIZE = 8;  // operation, x, w, third, stride, padding, dilation, groups

PyObject* key(PyObject*, PyObject* const* call, Py_ssize_t count) {
  if (count != CALL_SIZE) return PyErr_Format(PyExc_TypeError, "it takes the arguments of a call");
  Operands operands(call[1], call[2], call[3]);
  Ref found = operands.describe_all() ? key_of(call[0], operands, call + 4) : Ref();
  if (!found && !PyErr_Occurred()) Py_RETURN_NONE;
  return found.release();
}

PyObject* run_call(PyObject* executables, PyObject* const* call) {
  Operands operands(call[1], call[2], call[3]);
  if (!operands.describe_all()) return Py_NewRef(Py_NotImplemented);
  const Ref key = key_of(call[0], operands, call + 4);
  PyObject* found = key ? PyDict_GetItemWithError(executables, key.get()) : nullptr;
  if (!found) return PyErr_Occurred() ? nullptr : Py_NewRef(Py_NotImplemented);
  const Ref executable = Ref::borrowed(found);  // held, since another thread may drop it meanwhile
  if (found == Py_None) return Py_NewRef(Py_None);
  const Ref bound(PyObject_GetAttr(found, names.bound));
  if (!bound) return nullptr;
  if (Py_TYPE(bound.get()) != bound_type) return Py_NewRef(Py_NotImplemented);
  return run(*reinterpret_cast<Bound*>(bound.get()), operands);
}

PyObject* run_known(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != CALL_SIZE + 1 || !PyDict_Check(arguments[0]))
    return PyErr_Format(PyExc_TypeError, "it takes the executables, and the arguments of a call");
  return run_call(arguments[0], arguments + 1);
}

// Return 1 for a tensor of torch's own class that stores its values as they are, 0 for others, -1 on an exception.
int is_plain(PyObject* tensor) {
  Described described;
  if (!describe(tensor, described) || !described.data) return 0;  // null if empty, or if zeros are not stored
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(torch.unusual); ++i) {
    const int is_unusual = truth(Ref(PyObject_CallMethodNoArgs(tensor, PyTuple_GET_ITEM(torch.unusual, i))));
    if (is_unusual) return is_unusual < 0 ? -1 : 0;
  }
  return 1;
}

// with_autocast: whether autocast, the first of the functions, leaves the operands as they are.
int is_watched(bool with_autocast = false) {
  for (Py_ssize_t i = with_autocast; i < PyTuple_GET_SIZE(torch.watching); ++i) {
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

// Return 1, 0, or -1 with an exception set. third: None, or a tensor.
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
  PyObject* call[CALL_SIZE + 1] = {operation, x, w, third};
  for (Py_ssize_t i = 0; i < 5; ++i) call[4 + i] = PyTuple_GET_ITEM(rest, i);
  const Ref executables(PyObject_GetAttr(call[CALL_SIZE], names.executables));
  if (!executables) return nullptr;
  Ref result(run_call(executables.get(), call));
  if (result && result.get() != Py_None && result.get() != Py_NotImplemented) return result.release();
  PyErr_Clear();  // lack of memory, for example: Python runs the call again and handles the error
  PyObject* const again[] = {operation, x, w, third, rest};
  return PyObject_Vectorcall(values_in_python, again, 5, nullptr);
}

PyObject* values(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 5) return PyErr_Format(PyExc_TypeError, "it takes operation, x, w, bias or dy, and the rest");
  return values_of(arguments[0], arguments[1], arguments[2], arguments[3], arguments[4]);
}

// saved: x and w. needed: which of x, w, the bias and the rest need gradients.
PyObject* gradients_of(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 4) return PyErr_Format(PyExc_TypeError, "it takes x and w, what needs gradients, the rest and dy");
  PyObject *saved = arguments[0], *needed = arguments[1], *rest = arguments[2], *dy = arguments[3];
  if (!PyTuple_Check(saved) || PyTuple_GET_SIZE(saved) != 2 || !PyTuple_Check(needed) || PyTuple_GET_SIZE(needed) != 4)
    return PyErr_Format(PyExc_TypeError, "two tensors are saved, and there are four operands");
  PyObject *x = PyTuple_GET_ITEM(saved, 0), *w = PyTuple_GET_ITEM(saved, 1);
  const int is_recorded = truth(Ref(PyObject_CallNoArgs(torch.is_grad_enabled)));
  if (is_recorded) return is_recorded < 0 ? nullptr : Py_NewRef(Py_NotImplemented);
  const int eager = are_eager(x, w, dy);
  if (eager != 1) return eager < 0 ? nullptr : Py_NewRef(Py_NotImplemented);
  Ref results[4];
  for (Py_ssize_t i = 0; i < 4; ++i) {
    if (PyTuple_GET_ITEM(needed, i) != Py_True)
      results[i] = Ref::borrowed(Py_None);
    else if (i == 2)
      results[i] = Ref(PyObject_CallMethodOneArg(dy, names.sum, dimensions_of_bias));
    else
      results[i] = Ref(values_of(PyTuple_GET_ITEM(torch.operations, i + 1), x, w, dy, rest));
    if (!results[i]) return nullptr;
  }
  return PyTuple_Pack(4, results[0].get(), results[1].get(), results[2].get(), results[3].get());
}

PyObject* gradients(PyObject* module, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 2) return PyErr_Format(PyExc_TypeError, "it takes ctx and dy");
  PyObject* ctx = arguments[0];
  const Ref saved(PyObject_GetAttr(ctx, names.saved_tensors));
  if (!saved) return nullptr;  // for example, they were changed in place, or the graph was freed
  const Ref rest(PyObject_GetAttr(ctx, names.rest));
  if (!rest) return nullptr;
  const Ref needed(PyObject_GetAttr(ctx, names.needs_input_grad));
  if (!needed) return nullptr;
  PyObject* const known[] = {saved.get(), needed.get(), rest.get(), arguments[1]};
  return gradients_of(module, known, 4);
}

}  // namespace

#include "norms.h"

namespace {

PyObject* set_values_in_python(PyObject*, PyObject* function) {
  Py_XSETREF(values_in_python, Py_NewRef(function));
  Py_RETURN_NONE;
}

PyObject* set_up(PyObject*, PyObject* arguments) {
  PyObject *tensor, *parameter, *capsule, *get_num_threads, *empty_strided, *empty_like, *watching, *tracing_state;
  PyObject *forward_ad, *workspace, *is_grad_enabled, *operations, *unusual;
  if (!PyArg_ParseTuple(arguments, "O!O!OOOOO!OO!OOO!O!", &PyType_Type, &tensor, &PyType_Type, &parameter, &capsule,
                        &get_num_threads, &empty_strided, &empty_like, &PyTuple_Type, &watching, &tracing_state,
                        &PyDict_Type, &forward_ad, &workspace, &is_grad_enabled, &PyTuple_Type, &operations,
                        &PyTuple_Type, &unusual))
    return nullptr;
  const ExchangeApi* api = exchange_api(capsule);
  if (!api) return nullptr;
  torch = {reinterpret_cast<PyTypeObject*>(Py_NewRef(tensor)),
           reinterpret_cast<PyTypeObject*>(Py_NewRef(parameter)),
           api->describe,
           Py_NewRef(get_num_threads),
           Py_NewRef(empty_strided),
           Py_NewRef(empty_like),
           Py_NewRef(watching),
           Py_NewRef(tracing_state),
           Py_NewRef(forward_ad),
           Py_NewRef(workspace),
           Py_NewRef(is_grad_enabled),
           Py_NewRef(operations),
           Py_NewRef(unusual)};
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"set_up", set_up, METH_VARARGS, "Hand over what torch has."},
    {"is_eager", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(is_eager)), METH_FASTCALL,
     "Tell whether nobody watches, and x, w and third are plain."},
    {"key", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(key)), METH_FASTCALL,
     "Make the key of a call's executable; None: it is not for us."},
    {"run_known", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(run_known)), METH_FASTCALL,
     "Run a call whose executable is known and bound; None: torch's own runs it; NotImplemented: ask in Python."},
    {"values", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(values)), METH_FASTCALL,
     "Compute without autograd: operation, x, w, third, and the rest of the call."},
    {"gradients", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(gradients)), METH_FASTCALL,
     "Compute the gradients of a convolution; NotImplemented where they are recorded, or not eager."},
    {"gradients_of", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(gradients_of)), METH_FASTCALL,
     "Compute the gradients of a convolution, of x, w and the rest of the call."},
    {"batch_norm_key", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(batch_norm_key)), METH_FASTCALL,
     "Make the key of what is known of a batch norm; None: it is not for us."},
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

PyType_Spec bound_spec = {"mucudnn.running.eager._call.Bound", sizeof(Bound), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL, bound_slots};

PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT, "_call", "The hot path of a tuned call.", -1, methods, nullptr, nullptr, nullptr, nullptr};

bool intern_names() {
  const std::pair<PyObject**, const char*> all[] = {
      {&names.workspace, "workspace"},
      {&names.buffer, "buffer"},
      {&names.bound, "bound"},
      {&names.current_level, "_current_level"},
      {&names.executables, "executables"},
      {&names.rest, "rest"},
      {&names.saved_tensors, "saved_tensors"},
      {&names.needs_input_grad, "needs_input_grad"},
      {&names.sum, "sum"},
      {&names.contiguous, "contiguous"},
      {&names.requires_grad, "requires_grad"},
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
  bound_norm_type = bound_type ? reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&bound_norm_spec)) : nullptr;
  if (!bound_norm_type) return nullptr;
  Ref module(PyModule_Create(&module_definition));
  if (!module || PyModule_AddObjectRef(module.get(), "Bound", reinterpret_cast<PyObject*>(bound_type)) < 0 ||
      PyModule_AddObjectRef(module.get(), "BoundNorm", reinterpret_cast<PyObject*>(bound_norm_type)) < 0)
    return nullptr;
  return module.release();
}

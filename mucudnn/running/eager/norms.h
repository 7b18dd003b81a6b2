// The hot path of norms in training: the key of what is known of a call, the calls of the compiled functions, and the
// gradients. It is a part of _call.cpp and, like all there, handles the common case: other calls go back to Python.
#pragma once

namespace {

constexpr int32_t MOST_DIMS_OF_NORMS = 5;

// The tensors of the compiled functions, as their struct Operands: addresses, or null, and bytes.
struct NormOperands {
  struct {
    void* data;
    int64_t bytes;
  } x, mean, inverse, running_mean, running_var, weight, bias, added, mask, y, dy, dx, dadded, dweight, dbias;
};

struct Layout {
  int32_t dims;
  DataType dtype;
  int64_t shape[MOST_DIMS_OF_NORMS], strides[MOST_DIMS_OF_NORMS];

  bool is_of(const Described& tensor) const {
    if (tensor.device_type != ON_CPU || tensor.dims != dims || std::memcmp(&tensor.dtype, &dtype, sizeof dtype) != 0)
      return false;
    for (int32_t i = 0; i < dims; ++i)
      if (tensor.shape[i] != shape[i] || tensor.strides[i] != strides[i]) return false;
    return true;
  }

  // Return false for tensors with more dimensions, or on other devices.
  bool set(const Described& tensor) {
    if (tensor.device_type != ON_CPU || tensor.dims > MOST_DIMS_OF_NORMS) return false;
    dims = tensor.dims, dtype = tensor.dtype;
    std::copy_n(tensor.shape, dims, shape), std::copy_n(tensor.strides, dims, strides);
    return true;
  }
};

using MomentsEntry = int64_t (*)(const void* argument, const NormOperands* operands, double momentum);
using NormEntry = int64_t (*)(const void* argument, const NormOperands* operands);

struct BoundNorm {
  PyObject_HEAD
  PyObject* argument;  // which has the struct of the compiled functions
  const void* address;
  MomentsEntry moments;
  NormEntry forward, backward;
  Layout x, statistics, parameter;  // parameter has no dimensions where there is neither weight nor bias
  PyObject* statistic;              // a tensor like the mean and the inverse
  PyObject* on_huge_pages;          // a function that requests huge pages for a large tensor
  bool is_identity;                 // whether there is no activation
};

PyTypeObject* bound_norm_type = nullptr;

// Describe a tensor of a layout in an operand, which is null without one; return whether it is as expected.
template <class Operand>
bool fill(PyObject* tensor, const Layout& layout, Operand& operand) {
  Described described;
  if (!describe(tensor, described) || !layout.is_of(described)) return false;
  operand = {described.data, described.elements() * described.dtype.bits / 8};
  return true;
}

template <class Operand>
bool fill_or_null(PyObject* tensor, const Layout& layout, Operand& operand) {
  return tensor == Py_None || fill(tensor, layout, operand);
}

template <class Operand>
bool fill_vector(PyObject* tensor, Operand& operand) {
  Described described;
  if (tensor == Py_None) return true;
  if (!describe(tensor, described) || described.dims != 1 || described.strides[0] != 1) return false;
  operand = {described.data, described.elements() * described.dtype.bits / 8};
  return true;
}

// Allocate a tensor like another one, and describe it in an operand.
template <class Operand>
Ref new_like(const BoundNorm& bound, PyObject* like, const Layout& layout, Operand& operand) {
  constexpr int64_t LARGE_BYTES = 4 << 20;
  Ref result(PyObject_CallOneArg(torch.empty_like, like));
  if (!result || !fill(result.get(), layout, operand)) return Ref();
  if (operand.bytes >= LARGE_BYTES && !Ref(PyObject_CallOneArg(bound.on_huge_pages, result.get()))) return Ref();
  return result;
}

// Return what has no exception set, as NotImplemented.
PyObject* not_handled() { return PyErr_Occurred() ? nullptr : Py_NewRef(Py_NotImplemented); }

template <class Call>
bool is_accepted(Call call) {
  int64_t result = 0;
  Py_BEGIN_ALLOW_THREADS;
  result = call();
  Py_END_ALLOW_THREADS;
  return result >= 0;  // a refused call has written nothing: Python repeats it and raises the error
}

// Return 1 for a plain vector with an element for each channel, 0 for others, -1 on an exception.
int is_channel_vector(PyObject* tensor, const Described& x, Described& described) {
  if (!describe(tensor, described) || described.dims != 1 || described.shape[0] != x.shape[1] ||
      described.strides[0] != 1 || described.device_type != ON_CPU)
    return 0;
  return is_plain(tensor);
}

int64_t number_of(DataType dtype) { return int64_t(dtype.code) << 32 | int64_t(dtype.bits) << 16 | dtype.lanes; }

// norm, which is kept for ever, x, weight, bias, running mean, running variance.
PyObject* batch_norm_key(PyObject*, PyObject* const* call, Py_ssize_t count) {
  if (count != 6) return PyErr_Format(PyExc_TypeError, "it takes norm, x, two parameters and two statistics");
  const int watched = is_watched(true), is_recorded = truth(Ref(PyObject_CallNoArgs(torch.is_grad_enabled)));
  if (watched < 0 || is_recorded < 0) return nullptr;
  Described x;
  if (watched || !is_recorded || !describe(call[1], x) || x.dims < 2 || x.dims > MOST_DIMS_OF_NORMS ||
      x.device_type != ON_CPU)
    Py_RETURN_NONE;
  const int plain = is_plain(call[1]);
  if (plain != 1) return plain < 0 ? nullptr : Py_NewRef(Py_None);
  Key key;
  key.add(reinterpret_cast<intptr_t>(call[0]));
  key.add(x.dims);
  key.add(number_of(x.dtype));
  for (int32_t i = 0; i < x.dims; ++i) key.add(x.shape[i]), key.add(x.strides[i]);
  for (int i = 2; i < 6; ++i) {
    Described vector;
    if (call[i] == Py_None) {
      key.add(0);
      continue;
    }
    const int usual = is_channel_vector(call[i], x, vector);
    if (usual != 1) return usual < 0 ? nullptr : Py_NewRef(Py_None);
    if (i >= 4) {
      const int is_differentiable = truth(Ref(PyObject_GetAttr(call[i], names.requires_grad)));
      if (is_differentiable) return is_differentiable < 0 ? nullptr : Py_NewRef(Py_None);
    }
    key.add(number_of(vector.dtype));
  }
  const Ref threads(PyObject_CallNoArgs(torch.get_num_threads));
  if (!threads || !key.add_number(threads.get())) return PyErr_Occurred() ? nullptr : Py_NewRef(Py_None);
  return key.bytes();
}

BoundNorm& bound_norm(PyObject* self) { return *reinterpret_cast<BoundNorm*>(self); }

// x, running mean, running variance, momentum; returns mean and inverse.
PyObject* bound_norm_moments(PyObject* self, PyObject* const* call, Py_ssize_t count) {
  if (count != 4) return PyErr_Format(PyExc_TypeError, "it takes x, two running statistics and the momentum");
  const BoundNorm& bound = bound_norm(self);
  const double momentum = PyFloat_AsDouble(call[3]);
  NormOperands operands = {};
  if ((momentum == -1 && PyErr_Occurred()) || !fill(call[0], bound.x, operands.x) ||
      !fill_vector(call[1], operands.running_mean) || !fill_vector(call[2], operands.running_var))
    return not_handled();
  const Ref mean = new_like(bound, bound.statistic, bound.statistics, operands.mean);
  const Ref inverse = new_like(bound, bound.statistic, bound.statistics, operands.inverse);
  if (!mean || !inverse || !is_accepted([&] { return bound.moments(bound.address, &operands, momentum); }))
    return not_handled();
  return PyTuple_Pack(2, mean.get(), inverse.get());
}

// x, mean, inverse, weight, bias, added, mask, and y or None to allocate the result; returns y.
PyObject* bound_norm_forward(PyObject* self, PyObject* const* call, Py_ssize_t count) {
  if (count != 8) return PyErr_Format(PyExc_TypeError, "it takes the operands of a forward pass");
  const BoundNorm& bound = bound_norm(self);
  NormOperands operands = {};
  if (!fill(call[0], bound.x, operands.x) || !fill(call[1], bound.statistics, operands.mean) ||
      !fill(call[2], bound.statistics, operands.inverse) || !fill_or_null(call[3], bound.parameter, operands.weight) ||
      !fill_or_null(call[4], bound.parameter, operands.bias) || !fill_or_null(call[5], bound.x, operands.added) ||
      !fill_vector(call[6], operands.mask) || !fill_or_null(call[7], bound.x, operands.y))
    return not_handled();
  Ref y = call[7] == Py_None ? new_like(bound, call[0], bound.x, operands.y) : Ref::borrowed(call[7]);
  if (!y || !is_accepted([&] { return bound.forward(bound.address, &operands); })) return not_handled();
  return y.release();
}

// The tensors that the node of a group has saved (x, weight, bias, mean, inverse and mask), which of its operands need
// gradients, and dy; returns the gradients of these operands: of two that have none, x, weight, bias and the addition.
PyObject* bound_norm_backward(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 3 || !PyTuple_Check(arguments[0]) || PyTuple_GET_SIZE(arguments[0]) != 6 ||
      !PyTuple_Check(arguments[1]) || PyTuple_GET_SIZE(arguments[1]) != 6)
    return PyErr_Format(PyExc_TypeError, "it takes six saved tensors, for which of six there are gradients, and dy");
  PyObject *saved = arguments[0], *needed = arguments[1], *dy = arguments[2];
  const BoundNorm& bound = bound_norm(self);
  const int is_recorded = truth(Ref(PyObject_CallNoArgs(torch.is_grad_enabled)));
  if (is_recorded) return is_recorded < 0 ? nullptr : not_handled();
  const int plain = is_plain(dy);
  if (plain != 1) return plain < 0 ? nullptr : not_handled();
  const auto needs = [&](Py_ssize_t i) { return PyTuple_GET_ITEM(needed, i) == Py_True; };
  PyObject *x = PyTuple_GET_ITEM(saved, 0), *weight = PyTuple_GET_ITEM(saved, 1), *bias = PyTuple_GET_ITEM(saved, 2);
  NormOperands operands = {};
  if (!fill(dy, bound.x, operands.dy) || !fill(x, bound.x, operands.x) ||
      !fill_or_null(weight, bound.parameter, operands.weight) || !fill_or_null(bias, bound.parameter, operands.bias) ||
      !fill(PyTuple_GET_ITEM(saved, 3), bound.statistics, operands.mean) ||
      !fill(PyTuple_GET_ITEM(saved, 4), bound.statistics, operands.inverse) ||
      !fill_vector(PyTuple_GET_ITEM(saved, 5), operands.mask))
    return not_handled();
  Ref results[6];
  for (Ref& result : results) result = Ref::borrowed(Py_None);
  const auto make = [&](Py_ssize_t i, PyObject* like, const Layout& layout, auto& operand) {
    results[i] = new_like(bound, like, layout, operand);
    return bool(results[i]);
  };
  if ((needs(2) && !make(2, x, bound.x, operands.dx)) ||
      (weight != Py_None && !make(3, weight, bound.parameter, operands.dweight)) ||
      (bias != Py_None && !make(4, bias, bound.parameter, operands.dbias)) ||
      (needs(5) && !bound.is_identity && !make(5, x, bound.x, operands.dadded)))
    return not_handled();
  if (needs(5) && bound.is_identity) results[5] = Ref::borrowed(dy);
  if (!is_accepted([&] { return bound.backward(bound.address, &operands); })) return not_handled();
  PyObject* gradients = PyTuple_New(6);
  for (Py_ssize_t i = 0; gradients && i < 6; ++i)
    PyTuple_SET_ITEM(gradients, i, needs(i) ? results[i].release() : Py_NewRef(Py_None));
  return gradients;
}

// argument, its address, three entries, tensors like x, a parameter or None, and the mean, whether there is no
// activation, on_huge_pages. The strides of the last two may be others than those of the operands, which are 1.
PyObject* bound_norm_new(PyTypeObject* type, PyObject* arguments, PyObject*) {
  PyObject *argument, *x, *statistic, *parameter, *on_huge_pages;
  Py_ssize_t address, moments, forward, backward;
  int is_identity;
  if (!PyArg_ParseTuple(arguments, "OnnnnOOOpO", &argument, &address, &moments, &forward, &backward, &x, &parameter,
                        &statistic, &is_identity, &on_huge_pages))
    return nullptr;
  Ref owned(type->tp_alloc(type, 0));
  if (!owned) return nullptr;
  BoundNorm& bound = bound_norm(owned.get());
  bound.argument = Py_NewRef(argument);
  bound.address = reinterpret_cast<const void*>(address);
  bound.moments = reinterpret_cast<MomentsEntry>(moments);
  bound.forward = reinterpret_cast<NormEntry>(forward);
  bound.backward = reinterpret_cast<NormEntry>(backward);
  bound.statistic = Py_NewRef(statistic);
  bound.on_huge_pages = Py_NewRef(on_huge_pages);
  bound.is_identity = is_identity;
  const auto set = [](PyObject* tensor, Layout& layout) {
    Described described;
    return describe(tensor, described) && layout.set(described);
  };
  if (!set(x, bound.x) || !set(statistic, bound.statistics) ||
      (parameter != Py_None && !set(parameter, bound.parameter)))
    return PyErr_Format(PyExc_ValueError, "the tensors cannot be described");
  bound.statistics.strides[0] = bound.parameter.strides[0] = 1;
  return owned.release();
}

void bound_norm_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  for (PyObject* object : {bound_norm(self).argument, bound_norm(self).statistic, bound_norm(self).on_huge_pages})
    Py_XDECREF(object);
  type->tp_free(self);
  Py_DECREF(type);
}

PyMethodDef bound_norm_methods[] = {
    {"moments", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(bound_norm_moments)), METH_FASTCALL,
     "Compute mean and inverse, and update the running statistics."},
    {"forward", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(bound_norm_forward)), METH_FASTCALL,
     "Compute y, and the mask if there is one."},
    {"backward", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(bound_norm_backward)), METH_FASTCALL,
     "Compute the gradients of the node of a group."},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot bound_norm_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(bound_norm_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(bound_norm_dealloc)},
    {Py_tp_methods, bound_norm_methods},
    {0, nullptr},
};

PyType_Spec bound_norm_spec = {"mucudnn.running.eager._call.BoundNorm", sizeof(BoundNorm), 0, Py_TPFLAGS_DEFAULT,
                               bound_norm_slots};

}  // namespace

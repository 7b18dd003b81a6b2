// What graph/guards.py asks in every call of a graph, in C++ since a model has hundreds of modules and tensors: whether
// containers hold the same objects, and whether tensors have the same bytes.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "../running/eager/tensors.h"

namespace {

// After a call of the graph hardly any of what is compared is in the caches, so that waiting for memory is most of the
// time: it is loaded ahead.
constexpr int64_t LINE_BYTES = 64;

void load(const void* address) { static_cast<void>(*static_cast<const volatile char*>(address)); }

// ---- objects and containers -----------------------------------------------------------------------------------------

// Dictionaries, or those of classes, and copies of them. Other containers are compared by Python.
struct Containers {
  PyObject_HEAD
  struct One {
    Ref live, copy;
    PyObject* dictionary;  // null for other containers
    uint64_t version;
  };
  struct Object {
    Ref object, kind;
  };
  std::vector<One>* noted;
  std::vector<Object>* objects;
};

// A number that changes whenever a dictionary does, or 0 if this Python has none.
uint64_t version_of_dict(PyObject* dictionary) {
#if PY_VERSION_HEX < 0x030c0000
  return reinterpret_cast<PyDictObject*>(dictionary)->ma_version_tag;
#else
  return 0;
#endif
}

// Return 1 if a dictionary has the same objects under the same keys in the same order as its copy, or is empty too.
int has_same_entries(PyObject* live, PyObject* copy) {
  if (PyDict_GET_SIZE(live) != PyDict_GET_SIZE(copy)) return 0;
  if (PyDict_GET_SIZE(live) == 0) return 1;
  Py_ssize_t of_live = 0, of_copy = 0;
  PyObject *key, *value, *copied_key, *copied;
  while (PyDict_Next(live, &of_live, &key, &value))
    if (!PyDict_Next(copy, &of_copy, &copied_key, &copied) || key != copied_key || value != copied) return 0;
  return 1;
}

// Return 1 if a container equals its copy, 0 if not, -1 with an exception set.
int is_same(Containers::One& one) {
  if (!one.dictionary) return PyObject_RichCompareBool(one.live.get(), one.copy.get(), Py_EQ);
  const uint64_t version = version_of_dict(one.dictionary);
  if (version && version == one.version) return 1;
  int is_equal = has_same_entries(one.dictionary, one.copy.get());
  if (!is_equal) is_equal = PyObject_RichCompareBool(one.dictionary, one.copy.get(), Py_EQ);
  if (is_equal > 0) one.version = version;
  return is_equal;
}

PyObject* are_same(PyObject* object, PyObject*) {
  Containers& self = *reinterpret_cast<Containers*>(object);
  for (const Containers::Object& one : *self.objects)
    if (reinterpret_cast<PyObject*>(Py_TYPE(one.object.get())) != one.kind.get()) Py_RETURN_FALSE;
  for (Containers::One& one : *self.noted) {
    const int is_equal = is_same(one);
    if (is_equal < 0) return nullptr;
    if (!is_equal) Py_RETURN_FALSE;
  }
  Py_RETURN_TRUE;
}

PyObject* containers_new(PyTypeObject* type, PyObject* arguments, PyObject*) {
  PyObject *objects, *live, *copies;
  if (!PyArg_ParseTuple(arguments, "O!O!O!", &PyList_Type, &objects, &PyList_Type, &live, &PyList_Type, &copies))
    return nullptr;
  if (PyList_GET_SIZE(live) != PyList_GET_SIZE(copies))
    return PyErr_Format(PyExc_ValueError, "each container has one copy");
  Ref owned(type->tp_alloc(type, 0));
  if (!owned) return nullptr;
  Containers& self = *reinterpret_cast<Containers*>(owned.get());
  self.objects = new std::vector<Containers::Object>();
  self.noted = new std::vector<Containers::One>();
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(objects); ++i) {
    PyObject* one = PyList_GET_ITEM(objects, i);
    self.objects->push_back({Ref::borrowed(one), Ref::borrowed(reinterpret_cast<PyObject*>(Py_TYPE(one)))});
  }
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(live); ++i) {
    Containers::One one{Ref::borrowed(PyList_GET_ITEM(live, i)), Ref::borrowed(PyList_GET_ITEM(copies, i)), nullptr, 0};
    PyObject* of_class = PyType_Check(one.live.get()) ? reinterpret_cast<PyTypeObject*>(one.live.get())->tp_dict : nullptr;
    PyObject* dictionary = of_class ? of_class : one.live.get();
    if (PyDict_Check(dictionary) && PyDict_Check(one.copy.get())) one.dictionary = dictionary;
    if (one.dictionary && has_same_entries(one.dictionary, one.copy.get())) one.version = version_of_dict(dictionary);
    self.noted->push_back(std::move(one));
  }
  return owned.release();
}

void containers_dealloc(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  delete reinterpret_cast<Containers*>(object)->objects;
  delete reinterpret_cast<Containers*>(object)->noted;
  type->tp_free(object);
  Py_DECREF(type);
}

// ---- tensors --------------------------------------------------------------------------------------------------------

constexpr int64_t CHUNK_BYTES = 128, PARTS = 512, WHOLE_CHUNKS = 512;  // up to so many, all are compared in each call

// Return a hash of up to CHUNK_BYTES: NH of UMAC (Black, Halevi, Krawczyk, Krovetz, Rogaway 1999) with 64-bit words.
uint32_t digest(const char* data, int64_t size) {
  constexpr uint64_t GAMMA = 0x9e3779b97f4a7c15;
  char last[CHUNK_BYTES] = {};
  if (size % 16) {
    std::memcpy(last, data, size);
    data = last;
    size += 16 - size % 16;
  }
  unsigned __int128 sum = 0;
  uint64_t key = GAMMA;
  for (int64_t at = 0; at < size; at += 16, key += GAMMA) {
    uint64_t words[2];
    std::memcpy(words, data + at, sizeof(words));
    sum += static_cast<unsigned __int128>(words[0] + key) * (words[1] + (key ^ (key >> 29)));
  }
  return ((uint64_t(sum) ^ uint64_t(sum >> 64)) * GAMMA) >> 32;
}

struct Noted {
  Ref tensor, version, storage;
  const char *data = nullptr, *implementation = nullptr, *of_storage = nullptr;  // where torch keeps them
  int64_t bytes = 0, chunks = 0;
  size_t layout = 0, digests = 0;  // positions in the arrays of all
  bool is_suspect = false;         // bytes differed in an earlier call

  int64_t parts() const { return std::clamp<int64_t>(chunks, 1, PARTS); }
  int64_t part(int64_t turn) const { return uint32_t(turn) % uint32_t(parts()); }
};

struct Tensors {
  PyObject_HEAD
  int (*describe)(void* tensor, Described* out);
  PyGetSetDescrObject* version;  // Tensor._version
  std::vector<Noted>* noted;
  std::vector<int64_t>* layouts;   // shapes and strides, in one array, as are the hashes of all chunks: read in order
  std::vector<uint32_t>* digests;

  Ref version_of(PyObject* tensor) const {
    Ref found(version->d_getset->get(tensor, version->d_getset->closure));
    if (!found) PyErr_Clear();  // a tensor made in inference mode has none
    return found;
  }

  bool has_same_layout(const Noted& one, const Described& tensor) const {
    const int64_t* noted_shape = layouts->data() + one.layout;
    return std::equal(tensor.shape, tensor.shape + tensor.dims, noted_shape) &&
           std::equal(tensor.strides, tensor.strides + tensor.dims, noted_shape + tensor.dims);
  }

  uint32_t digest_of(const Noted& one, int64_t chunk) const {
    return digest(one.data + chunk * CHUNK_BYTES, std::min(CHUNK_BYTES, one.bytes - chunk * CHUNK_BYTES));
  }

  bool has_same_bytes(const Noted& one, int64_t first, int64_t step) const {
    for (int64_t chunk = first; chunk < one.chunks; chunk += step)
      if (digest_of(one, chunk) != (*digests)[one.digests + chunk]) return false;
    return true;
  }

  // Load what `is_as_noted` will read, so that the processor waits for many lines of memory at once: there they would
  // depend on each other.
  void load_all(int64_t turn) const {
    for (const Noted& one : *noted) {
      load(one.tensor.get());
      for (int64_t line = 0; line < 3; ++line) load(one.implementation + line * LINE_BYTES);  // it is larger than that
      load(one.of_storage);
      load(one.of_storage + LINE_BYTES - 1);
      if (one.bytes) load(one.data + one.part(turn) * CHUNK_BYTES);
    }
  }
};

// Return 1 if a tensor is as it was, 0 if not, -1 with an exception set.
int is_as_noted(const Tensors& self, Noted& one, int64_t turn) {
  Described described;
  if (self.describe(one.tensor.get(), &described) < 0) return -1;
  if (described.data != one.data || !self.has_same_layout(one, described)) return 0;
  Ref version = self.version_of(one.tensor.get());
  bool is_written = version.get() != one.version.get();
  if (is_written && version && one.version) {
    const int is_equal = PyObject_RichCompareBool(version.get(), one.version.get(), Py_EQ);
    if (is_equal < 0) return -1;
    is_written = !is_equal;
  }
  const bool is_whole = is_written || one.is_suspect || self.digests->size() <= WHOLE_CHUNKS;
  one.is_suspect = !self.has_same_bytes(one, is_whole ? 0 : one.part(turn), is_whole ? 1 : one.parts());
  if (is_written && !one.is_suspect) one.version = std::move(version);
  return !one.is_suspect;
}

PyObject* changed(PyObject* object, PyObject* argument) {
  const Tensors& self = *reinterpret_cast<Tensors*>(object);
  const int64_t turn = PyLong_AsLongLong(argument);
  if (turn < 0) return PyErr_Occurred() ? nullptr : PyErr_Format(PyExc_ValueError, "a turn is 0 or more");
  self.load_all(turn);
  for (size_t i = 0; i < self.noted->size(); ++i) {
    const int is_same = is_as_noted(self, (*self.noted)[i], turn);
    if (is_same < 0) return nullptr;
    if (!is_same) return PyLong_FromSize_t(i);
  }
  return PyLong_FromLong(-1);
}

// Return the address that an object of torch has as `_cdata`; null with an exception set if it has none.
const char* address_in(PyObject* object) {
  const Ref number(PyObject_GetAttrString(object, "_cdata"));
  return number ? static_cast<const char*>(PyLong_AsVoidPtr(number.get())) : nullptr;
}

// Return false with an exception set if a tensor cannot be noted.
bool note(Tensors& self, PyObject* tensor) {
  Described described;
  Noted one;
  one.tensor = Ref::borrowed(tensor);
  if (self.describe(tensor, &described) < 0) return false;
  if (described.device_type != ON_CPU) return PyErr_Format(PyExc_ValueError, "a tensor is not on the CPU");
  one.storage = Ref(PyObject_CallMethod(tensor, "untyped_storage", nullptr));
  one.implementation = address_in(tensor);
  one.of_storage = one.storage ? address_in(one.storage.get()) : nullptr;
  if (!one.implementation || !one.of_storage) return false;
  one.version = self.version_of(tensor);
  one.data = static_cast<const char*>(described.data);
  one.layout = self.layouts->size();
  self.layouts->insert(self.layouts->end(), described.shape, described.shape + described.dims);
  self.layouts->insert(self.layouts->end(), described.strides, described.strides + described.dims);
  int64_t last = 0;  // element
  for (int32_t dim = 0; dim < described.dims; ++dim) last += (described.shape[dim] - 1) * described.strides[dim];
  one.bytes = described.elements() ? (last + 1) * described.dtype.bits / 8 : 0;
  one.chunks = (one.bytes + CHUNK_BYTES - 1) / CHUNK_BYTES;
  one.digests = self.digests->size();
  for (int64_t chunk = 0; chunk < one.chunks; ++chunk) self.digests->push_back(self.digest_of(one, chunk));
  self.noted->push_back(std::move(one));
  return true;
}

PyObject* tensors_new(PyTypeObject* type, PyObject* arguments, PyObject*) {
  PyObject *capsule, *version, *tensors;
  if (!PyArg_ParseTuple(arguments, "OO!O!", &capsule, &PyGetSetDescr_Type, &version, &PyTuple_Type, &tensors))
    return nullptr;
  const ExchangeApi* api = exchange_api(capsule);
  Ref owned(api ? type->tp_alloc(type, 0) : nullptr);
  if (!owned) return nullptr;
  Tensors& self = *reinterpret_cast<Tensors*>(owned.get());
  self.describe = api->describe;
  self.version = reinterpret_cast<PyGetSetDescrObject*>(Py_NewRef(version));
  self.noted = new std::vector<Noted>();
  self.layouts = new std::vector<int64_t>();
  self.digests = new std::vector<uint32_t>();
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tensors); ++i)
    if (!note(self, PyTuple_GET_ITEM(tensors, i))) return nullptr;
  return owned.release();
}

void tensors_dealloc(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  const Tensors& self = *reinterpret_cast<Tensors*>(object);
  delete self.noted;
  delete self.layouts;
  delete self.digests;
  Py_XDECREF(self.version);
  type->tp_free(object);
  Py_DECREF(type);
}

PyMethodDef containers_methods[] = {
    {"are_same", are_same, METH_NOARGS, "Return whether all containers equal their copies, and all objects have the classes that they had."},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot containers_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(containers_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(containers_dealloc)},
    {Py_tp_methods, containers_methods},
    {0, nullptr},
};

PyMethodDef tensors_methods[] = {
    {"changed", changed, METH_O, "Return the number of a tensor that is not as it was; -1 if no change was found."},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot tensors_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(tensors_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(tensors_dealloc)},
    {Py_tp_methods, tensors_methods},
    {0, nullptr},
};

PyType_Spec specs[] = {
    {"mucudnn.graph._guards.Containers", sizeof(Containers), 0, Py_TPFLAGS_DEFAULT, containers_slots},
    {"mucudnn.graph._guards.Tensors", sizeof(Tensors), 0, Py_TPFLAGS_DEFAULT, tensors_slots},
};

PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT, "_guards", "The guards of a graph.", -1, nullptr, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__guards() {
  Ref module(PyModule_Create(&module_definition));
  for (PyType_Spec& spec : specs) {
    const Ref type(module ? PyType_FromSpec(&spec) : nullptr);
    if (!type || PyModule_AddType(module.get(), reinterpret_cast<PyTypeObject*>(type.get())) < 0) return nullptr;
  }
  return module.release();
}

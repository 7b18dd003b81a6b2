// Owned references, and tensors as they describe themselves by DLPack's exchange API, an independent standard: so the
// Python extensions need none of torch's headers.
#pragma once

#include <Python.h>

#include <cstdint>
#include <utility>

namespace {

class Ref {  // owns a reference, or is empty
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

// ---- DLPack (github.com/dmlc/dlpack), as far as it is used ----------------------------------------------------------

constexpr uint32_t DLPACK_VERSION = 1;  // the major version; minor versions keep the structures below
constexpr int32_t ON_CPU = 1;

struct DataType {
  uint8_t code, bits;
  uint16_t lanes;
};

struct Described {  // a DLTensor, which borrows what it points to
  void* data;
  int32_t device_type, device_id, dims;
  DataType dtype;
  int64_t *shape, *strides;  // strides in elements
  uint64_t byte_offset;

  int64_t elements() const {
    int64_t product = 1;
    for (int32_t i = 0; i < dims; ++i) product *= shape[i];
    return product;
  }
};

struct ExchangeApi {
  struct Header {
    uint32_t major, minor;
    Header* previous;
  } header;
  void *allocate, *to_managed, *from_managed;
  int (*describe)(void* tensor, Described* out);  // 0, or -1 with a Python exception set
  void* current_stream;
};

// Return the API behind a capsule, or null with an exception set.
inline const ExchangeApi* exchange_api(PyObject* capsule) {
  const auto* api = static_cast<const ExchangeApi*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
  if (api && (api->header.major != DLPACK_VERSION || !api->describe)) {
    PyErr_SetString(PyExc_ValueError, "this torch describes tensors by another version of DLPack");
    return nullptr;
  }
  return api;
}

}  // namespace

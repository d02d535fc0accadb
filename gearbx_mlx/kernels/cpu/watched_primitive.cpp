// A block is put together once for the modules and arrays of a layer; a shift, an adapter or a user may put others in
// their places. To look at all of them takes Python a tenth of a millisecond for each token, and this a few microseconds.

#include "watched.h"

#include "capsules.h"
#include "graph.h"

namespace gearbx {
namespace {

constexpr char WATCHED[] = "gearbx_watched";

// What a module had when this was made: its items, and theirs. Nothing is kept alive: an object is looked at only after
// the one that has it was found where it was.
class Watched {
 public:
  explicit Watched(nb::handle root) { add(root, -1, nb::none()); }

  bool is_same(nb::handle root) const {
    std::vector<nb::handle> now(seen_.size());
    for (size_t i = 0; i < seen_.size(); i++) {
      const Seen& was = seen_[i];
      now[i] = i == 0 ? root : item(now[static_cast<size_t>(was.owner)], was);
      if (now[i].ptr() != was.object || Py_TYPE(now[i].ptr()) != was.type) return false;
      if (was.is_array && nb::inst_ptr<mx::array>(now[i])->data_shared_ptr().get() != was.memory) return false;
      if (was.count >= 0 && size(now[i]) != was.count) return false;
      if (!was.x_bits.is_none() && !nb::getattr(now[i], "x_bits", nb::none()).equal(was.x_bits)) return false;
    }
    return true;
  }

 private:
  struct Seen {
    int owner;       // number of the object that has it
    nb::object key;  // name or number there
    PyObject* object;
    PyTypeObject* type;
    bool is_array = false;
    const void* memory = nullptr;  // of an array
    Py_ssize_t count = -1;         // of items
    nb::object x_bits = nb::none();
  };

  static Py_ssize_t size(nb::handle h) { return PyDict_Check(h.ptr()) ? PyDict_Size(h.ptr()) : PyList_Size(h.ptr()); }

  static nb::handle item(nb::handle owner, const Seen& seen) {
    if (PyDict_Check(owner.ptr())) return PyDict_GetItem(owner.ptr(), seen.key.ptr());
    const auto index = nb::cast<Py_ssize_t>(seen.key);
    return index < PyList_GET_SIZE(owner.ptr()) ? PyList_GET_ITEM(owner.ptr(), index) : nullptr;
  }

  void add(nb::handle object, int owner, nb::object key) {
    const int number = static_cast<int>(seen_.size());
    Seen seen = {owner, std::move(key), object.ptr(), Py_TYPE(object.ptr())};
    const bool is_dict = PyDict_Check(object.ptr()), is_list = PyList_Check(object.ptr());
    if (nb::isinstance<mx::array>(object)) {
      seen.is_array = true;
      seen.memory = nb::inst_ptr<mx::array>(object)->data_shared_ptr().get();
    } else if (is_dict || is_list) {
      seen.count = size(object);
      if (is_dict) seen.x_bits = nb::getattr(object, "x_bits", nb::none());
    }
    seen_.push_back(std::move(seen));
    if (is_dict)
      for (auto [name, value] : nb::borrow<nb::dict>(object)) add(value, number, nb::borrow(name));
    if (is_list)
      for (Py_ssize_t i = 0; i < PyList_GET_SIZE(object.ptr()); i++)
        add(PyList_GET_ITEM(object.ptr(), i), number, nb::cast(i));
  }

  std::vector<Seen> seen_;
};

}  // namespace

void bind_watched(nb::module_& m) {
  m.def("watched", [](nb::handle module) { return in_capsule(WATCHED, Watched(module)); }, "module"_a);
  m.def("is_same", [](const nb::capsule& watched, nb::handle module) {
    return from_capsule<Watched>(WATCHED, watched).is_same(module);
  }, "watched"_a, "module"_a);
}

}  // namespace gearbx

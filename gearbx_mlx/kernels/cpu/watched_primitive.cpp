// A block is put together once for the modules and arrays of a layer; a shift, an adapter or a user may put others in
// their places. To look at all of them takes Python a tenth of a millisecond for each token, and this microseconds.

#include "watched.h"

#include "capsules.h"
#include "graph.h"

namespace gearbx {
namespace {

constexpr char WATCHED[] = "gearbx_watched";

// What a block takes from the attributes of its modules.
constexpr const char* SETTINGS[] = {"eps",   "dims",    "base",       "scale", "traditional",
                                    "n_heads", "n_kv_heads", "bits", "group_size", "x_bits"};

// What a module had when this was made: its settings, its items, and theirs. Nothing but settings is kept alive: an
// object is looked at only after the one that has it was found where it was.
class Watched {
 public:
  explicit Watched(nb::handle root) { add(root, -1, nb::none()); }

  bool is_same(nb::handle root) const {
    std::vector<nb::handle> now(seen_.size());
    for (size_t i = 0; i < seen_.size(); i++) {
      const Seen& was = seen_[i];
      now[i] = i == 0 ? root : item(now[static_cast<size_t>(was.owner)], was);
      if (now[i].ptr() != was.object || Py_TYPE(now[i].ptr()) != was.type) return false;
      if (was.is_array && !was.array.is_same(now[i])) return false;
      if (was.count >= 0 && size(now[i]) != was.count) return false;
      if (was.attributes >= 0 && !has_settings(now[i], was)) return false;
    }
    return true;
  }

  bool has_tracer() const { return has_tracer_; }

 private:
  // Where the numbers of an array are, and how they are read.
  struct Array {
    const void* first = nullptr;  // none: it is still to be computed
    mx::Shape shape;
    mx::Strides strides;

    Array() = default;
    explicit Array(nb::handle h) {
      const mx::array& a = *nb::inst_ptr<mx::array>(h);
      if (!a.is_available()) return;
      first = a.data<char>();
      shape = a.shape();
      strides = a.strides();
    }
    bool is_same(nb::handle h) const {
      const mx::array& a = *nb::inst_ptr<mx::array>(h);
      const bool there = a.is_available();
      return there == (first != nullptr) &&
             (!there || (first == a.data<char>() && shape == a.shape() && strides == a.strides()));
    }
  };

  struct Seen {
    int owner;       // number of the object that has it
    nb::object key;  // name or number there
    PyObject* object;
    PyTypeObject* type;
    bool is_array = false;
    Array array = {};
    Py_ssize_t count = -1, attributes = -1;  // of items; of attributes beside them, -1 where there are none
    std::vector<std::pair<nb::object, nb::object>> settings = {};  // name and value
  };

  static Py_ssize_t size(nb::handle h) { return PyDict_Check(h.ptr()) ? PyDict_Size(h.ptr()) : PyList_Size(h.ptr()); }

  static nb::handle item(nb::handle owner, const Seen& seen) {
    if (PyDict_Check(owner.ptr())) return PyDict_GetItem(owner.ptr(), seen.key.ptr());
    const auto index = nb::cast<Py_ssize_t>(seen.key);
    return index < PyList_GET_SIZE(owner.ptr()) ? PyList_GET_ITEM(owner.ptr(), index) : nullptr;
  }

  static nb::object attributes_of(nb::handle object) {
    static PyObject* const name = PyUnicode_InternFromString("__dict__");
    return nb::steal(PyObject_GetAttr(object.ptr(), name));
  }

  static bool has_settings(nb::handle object, const Seen& was) {
    const nb::object attributes = attributes_of(object);
    if (PyDict_GET_SIZE(attributes.ptr()) != was.attributes) return false;  // else none was added
    for (const auto& [name, value] : was.settings) {
      const nb::handle now = PyDict_GetItem(attributes.ptr(), name.ptr());
      if (now.ptr() != value.ptr() && (!now || !now.equal(value))) return false;
    }
    return true;
  }

  static void note_settings(nb::handle object, Seen& seen) {
    if (!nb::hasattr(object, "__dict__")) return;  // a dictionary, and no module
    const nb::object attributes = attributes_of(object);
    seen.attributes = PyDict_GET_SIZE(attributes.ptr());
    for (const char* setting : SETTINGS) {
      const nb::object name = nb::steal(PyUnicode_InternFromString(setting));
      if (PyObject* value = PyDict_GetItem(attributes.ptr(), name.ptr()))
        seen.settings.emplace_back(name, nb::borrow(value));
    }
  }

  void add(nb::handle object, int owner, nb::object key) {
    const int number = static_cast<int>(seen_.size());
    Seen seen = {owner, std::move(key), object.ptr(), Py_TYPE(object.ptr())};
    const bool is_dict = PyDict_Check(object.ptr()), is_list = PyList_Check(object.ptr());
    if (nb::isinstance<mx::array>(object)) {
      seen.is_array = true;
      seen.array = Array(object);
      has_tracer_ = has_tracer_ || nb::inst_ptr<mx::array>(object)->is_tracer();
    } else if (is_dict || is_list) {
      seen.count = size(object);
      if (is_dict) note_settings(object, seen);
    }
    seen_.push_back(std::move(seen));
    if (is_dict)
      for (auto [name, value] : nb::borrow<nb::dict>(object)) add(value, number, nb::borrow(name));
    if (is_list)
      for (Py_ssize_t i = 0; i < PyList_GET_SIZE(object.ptr()); i++)
        add(PyList_GET_ITEM(object.ptr(), i), number, nb::cast(i));
  }

  std::vector<Seen> seen_;
  bool has_tracer_ = false;
};

}  // namespace

void bind_watched(nb::module_& m) {
  m.def("watched", [](nb::handle module) { return in_capsule(WATCHED, Watched(module)); }, "module"_a);
  m.def("has_tracer", [](nb::handle module) { return Watched(module).has_tracer(); }, "module"_a);
  m.def("is_same", [](const nb::capsule& watched, nb::handle module) {
    return from_capsule<Watched>(WATCHED, watched).is_same(module);
  }, "watched"_a, "module"_a);
}

}  // namespace gearbx

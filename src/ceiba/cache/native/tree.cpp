// The loops of the prefix tree that visit every node of a path: walk down, lock and unlock up, touch.
//
// They work on the Python nodes themselves (`ceiba.cache.base.Node`, a class with __slots__), whose slots are read and
// written where they lie; so policies, pins and audits in Python see one tree, and only the per-node interpreter cost is
// gone. Everything here runs under the GIL and keeps reference counts; nothing of a node is kept between calls.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <structmember.h>

#include <cstdint>
#include <cstring>

namespace nb = nanobind;

namespace {

using Tokens = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

Py_ssize_t common_prefix(const int32_t* a, const int32_t* b, Py_ssize_t n) {
  Py_ssize_t i = 0;
  for (; i + 16 <= n; i += 16)  // vectorises: whole blocks first, then the exact place
    if (std::memcmp(a + i, b + i, 64) != 0) break;
  while (i < n && a[i] == b[i]) i++;
  return i;
}

class PathOps {
  static constexpr Py_ssize_t FEW = 4;

 public:
  explicit PathOps(nb::type_object node) : type_(std::move(node)) {
    children_ = slot("children");
    branch_ = slot("branch");
    data_ = slot("data");
    parent_ = slot("parent");
    locks_ = slot("locks");
    hits_ = slot("hits");
    last_access_ = slot("last_access");
    priority_ = slot("priority");
    reach_ = slot("reach");
    handles_ = slot("handles");
  }

  // Nodes below `root` along the first `length` tokens, and how many of these they cover in whole pages.
  nb::tuple walk(nb::handle root, Tokens tokens, Py_ssize_t length, Py_ssize_t page) const {
    if (length < 0 || length > Py_ssize_t(tokens.size()) || page < 1)
      throw nb::value_error("walk: length or page is out of range");
    nb::list path;
    const int32_t* want = tokens.data();
    PyObject* node = check(root);
    Py_ssize_t at = 0;
    while (at + page <= length) {
      PyObject* child = recent(node, want + at, page);
      if (!child) child = find(dict(node), want + at, page);
      if (!child) break;
      check(child);
      __builtin_prefetch(get(child, branch_));
      path.append(nb::handle(child));
      PyObject* data = bytes(child);
      Py_ssize_t have = PyBytes_GET_SIZE(data) / 4, most = have < length - at ? have : length - at;
      const int32_t* run = reinterpret_cast<const int32_t*>(PyBytes_AS_STRING(data));
      if (most < have || std::memcmp(run, want + at, size_t(4 * have)) != 0) {
        Py_ssize_t same = common_prefix(run, want + at, most);
        at += same - same % page;
        break;
      }
      at += have;
      node = child;
    }
    return nb::make_tuple(path, at);
  }

  // One more lock on `node` and every node above it; returns the tokens that were not locked before.
  Py_ssize_t lock(nb::handle node, nb::handle clock, bool hit) const {
    Py_ssize_t gained = 0;
    for (PyObject* at = node.ptr(); below_root(at); at = get(at, parent_)) {
      note(get(at, parent_), at);
      long locks = number(at, locks_);
      if (locks == 0) gained += size(at);
      put(at, locks_, PyLong_FromLong(locks + 1));
      put(at, last_access_, Py_NewRef(clock.ptr()));
      if (hit) put(at, hits_, PyLong_FromLong(number(at, hits_) + 1));
    }
    return gained;
  }

  // One lock less on `node` and every node above it; returns the tokens that nobody holds any more.
  Py_ssize_t unlock(nb::handle node) const {
    Py_ssize_t lost = 0;
    for (PyObject* at = node.ptr(); below_root(at); at = get(at, parent_)) {
      long locks = number(at, locks_);
      if (locks <= 0) {
        PyErr_SetString(PyExc_RuntimeError, "a cache node was unlocked more often than locked");
        throw nb::python_error();
      }
      if (locks == 1) lost += size(at);
      put(at, locks_, PyLong_FromLong(locks - 1));
    }
    return lost;
  }

  // Marks the nodes of an inserted path as used now, by a request of `priority` that reached `reach` tokens.
  void touch(nb::list path, nb::handle clock, long priority, long reach) const {
    PyObject* above = nullptr;
    for (nb::handle item : path) {
      PyObject* node = check(item);
      if (above && get(node, parent_) == above) note(above, node);
      above = node;
      put(node, last_access_, Py_NewRef(clock.ptr()));
      if (number(node, priority_) < priority) put(node, priority_, PyLong_FromLong(priority));
      if (number(node, reach_) < reach) put(node, reach_, PyLong_FromLong(reach));
    }
  }

  // Copies the first out.size() handles of `component` along the path.
  void gather(nb::list path, nb::str component, nb::ndarray<int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> out) const {
    int32_t* to = out.data();
    Py_ssize_t left = Py_ssize_t(out.size());
    for (nb::handle item : path) {
      if (left == 0) return;
      PyObject* handles = get(check(item), handles_);
      PyObject* array = PyDict_Check(handles) ? PyDict_GetItemWithError(handles, component.ptr()) : nullptr;
      if (!array) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_KeyError, "a cache node lacks this component");
        throw nb::python_error();
      }
      Py_buffer view;
      if (PyObject_GetBuffer(array, &view, PyBUF_SIMPLE) != 0) throw nb::python_error();
      Py_ssize_t count = view.len / 4 < left ? view.len / 4 : left;
      std::memcpy(to, view.buf, size_t(4 * count));
      PyBuffer_Release(&view);
      to += count;
      left -= count;
    }
    if (left) throw nb::value_error("gather: the path holds fewer handles than wanted");
  }

  // Tokens of the nodes that nobody holds.
  Py_ssize_t unlocked(nb::list path) const {
    Py_ssize_t total = 0;
    for (nb::handle item : path) {
      PyObject* node = check(item);
      if (number(node, locks_) == 0) total += size(node);
    }
    return total;
  }

 private:
  // Where an attribute of __slots__ lies in its object.
  Py_ssize_t slot(const char* name) const {
    nb::object found = nb::getattr(type_, name);
    if (!PyObject_TypeCheck(found.ptr(), &PyMemberDescr_Type)) throw nb::type_error("a node's fields must be __slots__");
    const PyMemberDef* member = reinterpret_cast<PyMemberDescrObject*>(found.ptr())->d_member;
    if (member->type != T_OBJECT_EX) throw nb::type_error("a node's fields must be __slots__");
    return member->offset;
  }

  PyObject* dict(PyObject* node) const {
    PyObject* children = get(node, children_);
    if (!PyDict_Check(children)) throw nb::type_error("a cache node's children are no dictionary");
    return children;
  }

  // A path through a large tree is a chase from one cache miss to the next. The child that was used last, if it begins
  // with the `page` tokens at `want`, costs one of them; null if it is another.
  PyObject* recent(PyObject* node, const int32_t* want, Py_ssize_t page) const {
    PyObject* child = get(node, branch_);
    if (child == Py_None) return nullptr;
    PyObject* data = bytes(check(child));
    Py_ssize_t size = 4 * page;
    if (PyBytes_GET_SIZE(data) < size || get(child, parent_) != node) return nullptr;
    return std::memcmp(PyBytes_AS_STRING(data), want, size_t(size)) == 0 ? child : nullptr;
  }

  void note(PyObject* node, PyObject* child) const {
    if (get(check(node), branch_) != child) put(node, branch_, Py_NewRef(child));
  }

  // The child that begins with the `page` tokens at `want`, null if there is none. Few children are looked through as
  // they lie, which asks for their memory all at once, where a look-up would hash first and then follow one pointer
  // after the other.
  static PyObject* find(PyObject* children, const int32_t* want, Py_ssize_t page) {
    Py_ssize_t size = 4 * page, at = 0;
    PyObject *key, *child;
    if (PyDict_GET_SIZE(children) > FEW) {
      nb::object head = nb::steal(PyBytes_FromStringAndSize(reinterpret_cast<const char*>(want), size));
      if (!head.is_valid()) throw nb::python_error();
      child = PyDict_GetItemWithError(children, head.ptr());
      if (!child && PyErr_Occurred()) throw nb::python_error();
      return child;
    }
    PyObject *keys[FEW], *found[FEW];
    int count = 0;
    while (PyDict_Next(children, &at, &key, &child)) {
      __builtin_prefetch(key);
      __builtin_prefetch(child);
      keys[count] = key, found[count++] = child;
    }
    for (int i = 0; i < count; i++)
      if (PyBytes_Check(keys[i]) && PyBytes_GET_SIZE(keys[i]) == size &&
          std::memcmp(PyBytes_AS_STRING(keys[i]), want, size_t(size)) == 0)
        return found[i];
    return nullptr;
  }

  PyObject* check(nb::handle node) const {
    if (!PyObject_TypeCheck(node.ptr(), reinterpret_cast<PyTypeObject*>(type_.ptr())))
      throw nb::type_error("not a node of the prefix tree");
    return node.ptr();
  }

  static PyObject** place(PyObject* node, Py_ssize_t offset) {
    return reinterpret_cast<PyObject**>(reinterpret_cast<char*>(node) + offset);
  }
  static PyObject* get(PyObject* node, Py_ssize_t offset) {
    PyObject* value = *place(node, offset);
    if (!value) throw nb::attribute_error("a field of a cache node is not set");
    return value;
  }
  static void put(PyObject* node, Py_ssize_t offset, PyObject* value) {
    if (!value) throw nb::python_error();
    PyObject** at = place(node, offset);
    PyObject* old = *at;
    *at = value;
    Py_XDECREF(old);
  }
  static long number(PyObject* node, Py_ssize_t offset) {
    long value = PyLong_AsLong(get(node, offset));
    if (value == -1 && PyErr_Occurred()) throw nb::python_error();
    return value;
  }
  PyObject* bytes(PyObject* node) const {
    PyObject* data = get(node, data_);
    if (!PyBytes_Check(data)) throw nb::type_error("a cache node's data are no bytes");
    return data;
  }
  Py_ssize_t size(PyObject* node) const { return PyBytes_GET_SIZE(bytes(node)) / 4; }

  // Whether `at` is a node that has a parent: roots and nodes that left the tree have none.
  bool below_root(PyObject* at) const {
    if (at == Py_None) return false;
    check(at);
    return get(at, parent_) != Py_None;
  }

  nb::type_object type_;
  Py_ssize_t branch_, children_, data_, parent_, locks_, hits_, last_access_, priority_, reach_, handles_;
};

}  // namespace

NB_MODULE(_tree, m) {
  nb::set_leak_warnings(false);  // the package keeps one PathOps until the interpreter ends
  m.doc() = "Loops of the prefix tree over the nodes of a path; see ceiba.cache.paths for what each does.";
  nb::class_<PathOps>(m, "PathOps", "The loops, for one class of nodes.")
      .def(nb::init<nb::type_object>(), nb::arg("node"))
      .def("walk", &PathOps::walk, nb::arg("root"), nb::arg("tokens"), nb::arg("length"), nb::arg("page"))
      .def("lock", &PathOps::lock, nb::arg("node").none(), nb::arg("clock"), nb::arg("hit"))
      .def("unlock", &PathOps::unlock, nb::arg("node").none())
      .def("touch", &PathOps::touch, nb::arg("path"), nb::arg("clock"), nb::arg("priority"), nb::arg("reach"))
      .def("gather", &PathOps::gather, nb::arg("path"), nb::arg("component"), nb::arg("out"))
      .def("unlocked", &PathOps::unlocked, nb::arg("path"));
}

// The extension module of the CPU kernels: bindings only, the work is in one file per operation.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

namespace nb = nanobind;

namespace {

std::vector<std::string> instruction_sets() {
  std::vector<std::string> found;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) found.emplace_back("avx2");
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")) found.emplace_back("avx512");
  if (__builtin_cpu_supports("avx512vnni")) found.emplace_back("vnni");
#endif
  return found;
}

}  // namespace

NB_MODULE(_cpu, m) {
  m.doc() = "CPU kernels of Ceiba.";
  m.def("instruction_sets", &instruction_sets, "Instruction sets of this processor that the kernels can use.");
}

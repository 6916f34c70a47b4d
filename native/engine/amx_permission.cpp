#include "amx_permission.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace lakh {
namespace {

// Of leaf 7 of CPUID, in EDX (Intel's Software Developer's Manual, volume 2A).
constexpr unsigned kTiles = 1u << 24, kInt8Products = 1u << 25;
// Of Linux: asm/prctl.h and the number of the tiles' state in arch/x86/include/asm/fpu/types.h.
constexpr long kRequestPermission = 0x1023, kTileData = 18;

bool cpu_has_tiles() {
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kTiles) != 0 && (d & kInt8Products) != 0;
}

}  // namespace

bool has_amx_permission() { return cpu_has_tiles() && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0; }

}  // namespace lakh
#else
bool lakh::has_amx_permission() { return false; }
#endif

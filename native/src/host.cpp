// CPU features, and the host identity that decides which ranks share memory.
#include <sys/stat.h>

#include <cstdio>
#include <cstring>
#include <string>

#include "lakh_c3.h"

namespace {

size_t copy_out(const std::string &value, char *text, size_t size) {
  if (text != nullptr && size > 0) {
    const size_t n = value.size() < size - 1 ? value.size() : size - 1;
    std::memcpy(text, value.data(), n);
    text[n] = '\0';
  }
  return value.size();
}

std::string cpu_features() {
  std::string found;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const auto add = [&found](bool has, const char *name) {
    if (has) found += (found.empty() ? "" : " ") + std::string(name);
  };
  add(__builtin_cpu_supports("sse4.2"), "sse4.2");
  add(__builtin_cpu_supports("avx2"), "avx2");
  add(__builtin_cpu_supports("fma"), "fma");
  add(__builtin_cpu_supports("avx512f"), "avx512f");
  add(__builtin_cpu_supports("avx512bw"), "avx512bw");
#elif defined(__aarch64__)
  found = "neon";
#endif
  return found;
}

std::string host_identity() {
  std::FILE *file = std::fopen("/proc/sys/kernel/random/boot_id", "r");
  if (file == nullptr) return "";
  char boot[64] = {0};
  const char *line = std::fgets(boot, sizeof boot, file);
  std::fclose(file);
  if (line == nullptr) return "";
  boot[std::strcspn(boot, "\n")] = '\0';
  // Two containers of one kernel share a boot id but cannot open each other's memory: their process-id namespaces differ.
  struct stat pids {};
  const bool known = ::stat("/proc/self/ns/pid", &pids) == 0;
  return std::string(boot) + "/" + (known ? std::to_string(static_cast<unsigned long long>(pids.st_ino)) : "no-proc");
}

}  // namespace

extern "C" {

int32_t lakh_c3_abi(void) { return LAKH_C3_ABI; }

size_t lakh_c3_cpu_features(char *text, size_t size) { return copy_out(cpu_features(), text, size); }

size_t lakh_c3_host_identity(char *text, size_t size) { return copy_out(host_identity(), text, size); }
}

/* The C ABI of lakh's native core. Every function returns a status or a plain value and never throws or aborts.
 *
 * LAKH_C3_ABI goes up by one with every change that an older caller would misread; lakh.c3.native refuses a library of
 * another number.
 */
#ifndef LAKH_C3_H
#define LAKH_C3_H

#include <stddef.h>
#include <stdint.h>

#define LAKH_C3_ABI 1
#define LAKH_C3_EXPORT __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

/* The LAKH_C3_ABI that the library was built with. */
LAKH_C3_EXPORT int32_t lakh_c3_abi(void);

/* Vector extensions that this CPU has, as a space-separated list, e.g. "avx2 avx512f bf16 amx".
 * Writes at most `size` bytes with the closing zero and returns the length that was needed without it. */
LAKH_C3_EXPORT size_t lakh_c3_cpu_features(char *text, size_t size);

/* A text that is equal for two processes exactly when they share the memory of one running host: the kernel's boot id
 * and the mount of /dev/shm. Same form of result as above; 0 when the host gives no boot id. */
LAKH_C3_EXPORT size_t lakh_c3_host_identity(char *text, size_t size);

#ifdef __cplusplus
}
#endif
#endif

/* The C ABI of lakh's native core. Every function returns a status or a plain value and never throws or aborts.
 *
 * A *group* is this process's communicator in a set of ranks. Ranks of one host use shared memory, others TCP.
 * Operations run in the order of their calls: in the calling thread (`ticket` is NULL), or in the group's thread (then
 * `ticket` receives a number for lakh_c3_wait). The caller keeps buffers valid until the operation completes.
 *
 * LAKH_C3_ABI increases with every incompatible change; lakh.c3.native refuses a library with another number.
 */
#ifndef LAKH_C3_H
#define LAKH_C3_H

#include <stddef.h>
#include <stdint.h>

#define LAKH_C3_ABI 6
#define LAKH_C3_EXPORT __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

/* Statuses. A status is also the cause of a failure; callers need not parse texts. DISCONNECTED, TIMEOUT, ABORTED, DIED,
 * UNREACHABLE and LEFT end the group. */
#define LAKH_C3_OK 0
#define LAKH_C3_INVALID 1      /* the ranks call different operations, or an argument is invalid */
#define LAKH_C3_DISCONNECTED 2 /* a rank closed or lost a connection: it died, or has left a failed group */
#define LAKH_C3_TIMEOUT 3      /* the deadline passed */
#define LAKH_C3_ABORTED 4      /* a rank called lakh_c3_abort */
#define LAKH_C3_SYSTEM 5       /* a system call failed */
#define LAKH_C3_CLOSED 6       /* the group is NULL: its owner has closed it */
#define LAKH_C3_DIED 7         /* the process of a rank died */
#define LAKH_C3_UNREACHABLE 8  /* the link to a rank is cut */
#define LAKH_C3_LEFT 9         /* a rank closed its group in order */

/* Types of elements, operators, operations. */
enum { LAKH_C3_F32, LAKH_C3_F64, LAKH_C3_F16, LAKH_C3_BF16, LAKH_C3_I32, LAKH_C3_I64, LAKH_C3_U8, LAKH_C3_I8 };
enum { LAKH_C3_SUM, LAKH_C3_AVG, LAKH_C3_MIN, LAKH_C3_MAX, LAKH_C3_PROD };
enum {
  LAKH_C3_ALL_REDUCE,
  LAKH_C3_ALL_GATHER,
  LAKH_C3_REDUCE_SCATTER,
  LAKH_C3_BROADCAST,
  LAKH_C3_REDUCE,
  LAKH_C3_GATHER,
  LAKH_C3_SCATTER,
  LAKH_C3_ALL_TO_ALL,
  LAKH_C3_BARRIER,
  LAKH_C3_SCHEDULE
};

/* Steps of a schedule. Offsets and counts are in elements; in the wire buffer, in bytes. */
enum {
  LAKH_C3_STEP_SEND,         /* src[src_offset, count) to peer */
  LAKH_C3_STEP_RECV,         /* from peer into dst[dst_offset, count) */
  LAKH_C3_STEP_RECV_REDUCE,  /* dst = dst op received */
  LAKH_C3_STEP_COPY,         /* dst = src */
  LAKH_C3_STEP_FOLD,         /* dst = src[0] op src[1] ... of `fan` consecutive parts of src */
  LAKH_C3_STEP_HOST_REDUCE_SCATTER, /* among the ranks of this host: reduces this rank's part of dst[dst_offset, count) */
  LAKH_C3_STEP_HOST_ALL_GATHER,     /* among the ranks of this host: gathers all parts of that range */
  LAKH_C3_STEP_HOST_BROADCAST,      /* among the ranks of this host: copies the range of the rank with host index `fan` */
  LAKH_C3_STEP_ENCODE,       /* src elements -> bytes in the wire buffer, with the codec of the operation */
  LAKH_C3_STEP_DECODE,       /* wire bytes -> dst elements */
  LAKH_C3_STEP_DECODE_REDUCE /* dst = dst op decoded */
};
enum { LAKH_C3_BUFFER_OUTPUT, LAKH_C3_BUFFER_INPUT, LAKH_C3_BUFFER_SCRATCH, LAKH_C3_BUFFER_WIRE };
enum { LAKH_C3_CODEC_NONE, LAKH_C3_CODEC_BF16, LAKH_C3_CODEC_INT8, LAKH_C3_CODEC_INT4 };

typedef struct {
  int32_t stage; /* steps of one stage run concurrently; stages run one after another */
  int32_t kind;
  int32_t peer;
  int32_t src, dst; /* which buffer */
  int32_t fan;
  int64_t src_offset, dst_offset, count;
} lakh_c3_step;

typedef struct {
  int32_t operation, dtype, op, root;
  const void *input;
  void *output;
  int64_t count;          /* elements of one rank's part; of the whole buffer for all_reduce, broadcast and reduce */
  const int64_t *splits;  /* all_to_all: size+1 offsets into input, then size+1 offsets into output, in elements */
  const lakh_c3_step *steps;
  int64_t num_steps, scratch_count, wire_bytes;
  int32_t codec;
  float *residual;        /* error feedback of ENCODE, the size of output; or NULL */
  uint64_t seed;          /* of stochastic rounding */
} lakh_c3_call;

typedef struct lakh_c3_group lakh_c3_group;

typedef struct {
  uint64_t operations, bytes_in, bytes_sent, bytes_received, wait_us, futex_waits, connections, single_copy_bytes;
} lakh_c3_counters;

/* The LAKH_C3_ABI of the library. */
LAKH_C3_EXPORT int32_t lakh_c3_abi(void);

/* Vector extensions of this CPU as a space-separated list, e.g. "avx2 avx512f bf16 amx".
 * Writes at most `size` bytes including the terminating zero and returns the required length without it. */
LAKH_C3_EXPORT size_t lakh_c3_cpu_features(char *text, size_t size);

/* A text that is equal for two processes if and only if they can share memory: the kernel's boot id and the process-id
 * namespace, through which they open each other's memory. Same result convention as above. */
LAKH_C3_EXPORT size_t lakh_c3_host_identity(char *text, size_t size);

/* Opens this process's listening socket on `address` ("" is all interfaces; repeated calls share it) and returns its port,
 * or 0 on failure. */
LAKH_C3_EXPORT int32_t lakh_c3_listen(const char *address);

/* First step of joining: creates this rank's shared memory. `memory` receives the descriptor that peers open. The uuid names
 * the group and is sent in clear; the secret, the same for all ranks, authenticates connections and is never sent. */
LAKH_C3_EXPORT lakh_c3_group *lakh_c3_open(const uint8_t uuid[16], const uint8_t secret[32], int32_t rank, int32_t size,
                                           int32_t *memory);

/* Second step: attaches to the peers. host[r] is the number of rank r's host; pid, memory and address ("ip:port") are the
 * values that rank r published. After a failure the group can only be closed. */
LAKH_C3_EXPORT int32_t lakh_c3_join(lakh_c3_group *group, const int32_t *host, const int32_t *pid,
                                    const int32_t *memory, const char *const *address, int64_t timeout_ms,
                                    int32_t streams, int64_t single_copy_from_bytes);

/* Transport of large messages to `peer`: chunks distributed over streams, each with at most `in_flight_bytes` in flight
 * (the kernel may allow less). Both ends must set the same values, after joining and before any data. */
LAKH_C3_EXPORT int32_t lakh_c3_wire(lakh_c3_group *group, int32_t peer, int32_t streams, int64_t chunk_bytes,
                                    int64_t in_flight_bytes);

LAKH_C3_EXPORT void lakh_c3_set_timeout(lakh_c3_group *group, int64_t timeout_ms);

/* Emulated links for experiments: bytes to `peer` pass through virtual link `link` of `file` (shared by all processes) at
 * `bytes_per_s` and arrive `delay_us` later. Repeated calls make a path of links. */
LAKH_C3_EXPORT int32_t lakh_c3_shape(lakh_c3_group *group, int32_t peer, const char *file, int32_t link,
                                     double bytes_per_s, int64_t delay_us);

LAKH_C3_EXPORT int32_t lakh_c3_run(lakh_c3_group *group, const lakh_c3_call *call, int64_t *ticket);
/* The most common call, cheaper from ctypes: a synchronous collective without extras. */
LAKH_C3_EXPORT int32_t lakh_c3_collective(lakh_c3_group *group, int32_t operation, int32_t dtype, int32_t op,
                                          int32_t root, const void *input, void *output, int64_t count);
LAKH_C3_EXPORT int32_t lakh_c3_wait(lakh_c3_group *group, int64_t ticket, int64_t timeout_ms);
/* 1 if the operation has completed or failed, else 0. */
LAKH_C3_EXPORT int32_t lakh_c3_done(lakh_c3_group *group, int64_t ticket);

/* Messages between two ranks, in order per direction and tag. */
LAKH_C3_EXPORT int32_t lakh_c3_send(lakh_c3_group *group, int32_t peer, int32_t tag, const void *data, int64_t bytes,
                                    int64_t *ticket);
/* peer -1: from any rank; `*source` receives the sender on completion. */
LAKH_C3_EXPORT int32_t lakh_c3_recv(lakh_c3_group *group, int32_t peer, int32_t tag, void *data, int64_t bytes,
                                    int32_t *source, int64_t *ticket);
LAKH_C3_EXPORT int32_t lakh_c3_wait_message(lakh_c3_group *group, int64_t ticket, int64_t timeout_ms);
/* 1 if the message has completed or failed and was not waited for, else 0. */
LAKH_C3_EXPORT int32_t lakh_c3_message_done(lakh_c3_group *group, int64_t ticket);

/* Registered memory, which all ranks of a host reduce in place. NULL on failure. */
LAKH_C3_EXPORT void *lakh_c3_allocate(size_t bytes);
LAKH_C3_EXPORT void lakh_c3_free(void *memory);

/* The text of this thread's last error. lakh_c3_failure returns the status of a group that has ended (else 0), with its
 * text and the ranks that caused it. */
LAKH_C3_EXPORT size_t lakh_c3_error(char *text, size_t size);
LAKH_C3_EXPORT int32_t lakh_c3_failure(lakh_c3_group *group, char *text, size_t size, int32_t *dead, int32_t dead_size);
LAKH_C3_EXPORT void lakh_c3_abort(lakh_c3_group *group, const char *reason);
LAKH_C3_EXPORT void lakh_c3_close(lakh_c3_group *group);

LAKH_C3_EXPORT void lakh_c3_read_counters(lakh_c3_group *group, lakh_c3_counters *counters);
/* Time this rank has waited for each rank, in microseconds. */
LAKH_C3_EXPORT void lakh_c3_waited_us(lakh_c3_group *group, uint64_t *per_rank);

/* Codecs: encoded size of `count` elements; encoding and decoding of float32. */
LAKH_C3_EXPORT int64_t lakh_c3_codec_bytes(int32_t codec, int64_t count);
LAKH_C3_EXPORT int32_t lakh_c3_encode(int32_t codec, const float *values, int64_t count, uint64_t seed, void *wire,
                                      float *residual);
LAKH_C3_EXPORT int32_t lakh_c3_decode(int32_t codec, const void *wire, int64_t count, float *values, int32_t add);

#ifdef __cplusplus
}
#endif
#endif

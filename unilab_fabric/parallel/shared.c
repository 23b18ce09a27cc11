/* Sums over the ranks of one machine in memory that all of them map. shared.py compiles this file and binds it.
 *
 * The region holds a word for each rank, the number of its newest call, on a cache line of its own, and behind them two
 * slots for each rank. Call k uses slot k % 2: a rank that is at call k + 2 has seen all others at k + 1, and so done
 * with k. Every rank adds up the same floats in the order of ranks, so all get the same bits.
 */
#include <errno.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { LINE = 64, SPINS = 300 };

static _Atomic uint32_t *word(char *region, long rank) { return (_Atomic uint32_t *)(region + LINE * rank); }

static float *slot(char *region, long ranks, long capacity, uint32_t call, long rank) {
    return (float *)(region + LINE * ranks) + ((call & 1) * ranks + rank) * capacity;
}

/* Shows this rank's part of call `call` to the others. */
void shared_publish(char *region, const float *buffer, long count, long rank, long ranks, long capacity, long call) {
    memcpy(slot(region, ranks, capacity, (uint32_t)call, rank), buffer, count * sizeof(float));
    atomic_store_explicit(word(region, rank), (uint32_t)call, memory_order_release);
    syscall(SYS_futex, word(region, rank), FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

/* Replaces `buffer` by the sum; returns -1, or a rank that has not shown its part within `wait_ns`. */
long shared_collect(char *region, float *buffer, long count, long ranks, long capacity, long call, long wait_ns) {
    for (long other = 0; other < ranks; other++) {
        _Atomic uint32_t *theirs = word(region, other);
        uint32_t seen;
        int spins = 0;
        while ((int32_t)((seen = atomic_load_explicit(theirs, memory_order_acquire)) - (uint32_t)call) < 0) {
            if (spins++ < SPINS)
                continue;
            struct timespec wait = {wait_ns / 1000000000, wait_ns % 1000000000};
            /* not FUTEX_WAIT_PRIVATE: the word is another process's too */
            if (syscall(SYS_futex, theirs, FUTEX_WAIT, seen, &wait, NULL, 0) != 0 && errno == ETIMEDOUT)
                return other;
        }
    }
    const float *first = slot(region, ranks, capacity, (uint32_t)call, 0);
    const float *second = slot(region, ranks, capacity, (uint32_t)call, 1);
    for (long i = 0; i < count; i++)
        buffer[i] = first[i] + second[i];
    for (long rank = 2; rank < ranks; rank++) {
        const float *next = slot(region, ranks, capacity, (uint32_t)call, rank);
        for (long i = 0; i < count; i++)
            buffer[i] += next[i];
    }
    return -1;
}

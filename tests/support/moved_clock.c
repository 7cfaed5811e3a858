/* Preloaded into a redis-server: its wall clock is what stands in the file $QWORKER_TEST_CLOCK, two numbers of 8 bytes: microseconds,
 * and whether the clock stands still. If so they are since 1970, and each look adds one, so that no two are alike; otherwise they are
 * added to the machine's clock. libfaketime cannot do it: it and jemalloc wait for each other before main. */
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

struct moved {
    volatile int64_t microseconds;
    volatile int64_t stands;
};

static struct moved *moved;
static int64_t looks;

__attribute__((constructor)) static void attach(void) {
    const char *path = getenv("QWORKER_TEST_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) abort();
    void *mapped = mmap(NULL, sizeof *moved, PROT_READ, MAP_SHARED, file, 0);
    if (mapped == MAP_FAILED) abort();
    moved = mapped;
    close(file);
}

/* Microseconds since 1970, as this process is to see them. The system call itself: jemalloc asks before anything can be looked up. */
static int64_t wall_clock(void) {
    struct timespec now;
    if (syscall(SYS_clock_gettime, CLOCK_REALTIME, &now)) abort();
    int64_t microseconds = (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000;
    if (moved && moved->stands)
        microseconds = moved->microseconds + __atomic_add_fetch(&looks, 1, __ATOMIC_RELAXED);
    else if (moved)
        microseconds += moved->microseconds;
    return microseconds;
}

int gettimeofday(struct timeval *restrict value, void *restrict zone) {
    int64_t microseconds = wall_clock();
    (void)zone;
    value->tv_sec = microseconds / 1000000;
    value->tv_usec = microseconds % 1000000;
    return 0;
}

/* Valkey 9 asks in this way. */
int clock_gettime(clockid_t clock, struct timespec *value) {
    if (clock != CLOCK_REALTIME) return (int)syscall(SYS_clock_gettime, clock, value);
    int64_t microseconds = wall_clock();
    value->tv_sec = microseconds / 1000000;
    value->tv_nsec = microseconds % 1000000 * 1000;
    return 0;
}

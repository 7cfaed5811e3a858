/* Preloaded into a redis-server: its wall clock is the machine's plus what stands in the file $QWORKER_TEST_CLOCK (8 bytes,
 * microseconds). libfaketime cannot do it: it and jemalloc wait for each other before main. */
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *offset;

__attribute__((constructor)) static void attach(void) {
    const char *path = getenv("QWORKER_TEST_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) abort();
    void *mapped = mmap(NULL, sizeof *offset, PROT_READ, MAP_SHARED, file, 0);
    if (mapped == MAP_FAILED) abort();
    offset = mapped;
    close(file);
}

int gettimeofday(struct timeval *restrict value, void *restrict zone) {
    struct timespec now;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &now)) return -1;
    int64_t microseconds = (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000 + (offset ? *offset : 0);
    value->tv_sec = microseconds / 1000000;
    value->tv_usec = microseconds % 1000000;
    return 0;
}

/* Many short reads of a file in one call, which threads can make at the same time. */
#define _POSIX_C_SOURCE 200809L
#include <errno.h>
#include <stdint.h>
#include <unistd.h>

/* A part of a file; native.py fills it in this order. */
typedef struct {
    int64_t position; /* in the file */
    int64_t size;     /* in bytes */
    int64_t place;    /* of its first byte in the output */
} Part;

/* Read parts of a file. Return 0; or the error's number, EIO if the file is too short. */
int64_t recsys_read_parts(int64_t file, const Part *parts, int64_t num_parts, uint8_t *out)
{
    for (const Part *part = parts; part < parts + num_parts; part++)
        for (int64_t done = 0; done < part->size;) {
            ssize_t count = pread((int)file, out + part->place + done,
                                  (size_t)(part->size - done), part->position + done);
            if (count < 0 && errno == EINTR)
                continue;
            if (count <= 0)
                return count ? errno : EIO;
            done += count;
        }
    return 0;
}

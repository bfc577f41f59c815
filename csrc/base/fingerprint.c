#include "base/fingerprint.h"

#include <string.h>

#include "base/check.h"

#define KEY_LOW 0x9E3779B97F4A7C15u
#define KEY_HIGH 0xC2B2AE3D27D4EB4Fu

__extension__ typedef unsigned __int128 product;

tp_fingerprint tp_fingerprint_of(const void *data, size_t bytes) {
    TP_REQUIRE(bytes % 16 == 0);
    const unsigned char *at = data;
    tp_fingerprint sum = {0, 0};
    uint64_t low = 0, high = 0;
    for (size_t i = 0; i < bytes; i += 16) {
        uint64_t word[2];
        memcpy(word, at + i, sizeof word);
        low += KEY_LOW;
        high += KEY_HIGH;
        const uint64_t a = word[0] ^ low ^ (low >> 32);
        const uint64_t b = word[1] ^ high ^ (high >> 32);
        const product p = (product)a * b;
        /* The other half of the word is added, so that a factor of 0 hides nothing. */
        sum.low += (uint64_t)p + word[1];
        sum.high += (uint64_t)(p >> 64) + word[0];
    }
    return sum;
}

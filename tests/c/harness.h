/* harness: what every C test program is made of.
 *
 *     TEST(copy_arrives_after_sync) { ... EXPECT(x == 1); ... }
 *
 * A program is one or more test_*.c linked with harness.c, which has main:
 *     test_x                 runs every test
 *     test_x NAME|PATTERN... runs the tests of that name, or matching a shell pattern
 *     test_x --list          prints the names
 * It ends with the line "N passed, N failed, N skipped" and exits 0, 1 when a test failed, 77
 * when all that ran were skipped, 2 when no test has a name asked for.
 *
 * Environment: TP_SEED (of the random tests; printed when a test fails), TP_TEST_TIMEOUT_S (for
 * each test, 300), TP_TEST_ROUNDS_FACTOR (multiplies test_rounds), TP_RULES_OFF (a sum of tp_rule,
 * in force for every world and rig), TP_TEST_VERBOSE. */
#ifndef TP_TESTS_HARNESS_H
#define TP_TESTS_HARNESS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/check.h"
#include "base/status.h"

typedef struct test_case {
    const char *name;
    void (*run)(void);
    struct test_case *next;
} test_case;

void test_register(test_case *test);

#define TEST(test_name)                                                                        \
    static void test_name(void);                                                               \
    __attribute__((constructor)) static void test_name##_register(void) {                      \
        static test_case test = {#test_name, test_name, NULL};                                 \
        test_register(&test);                                                                  \
    }                                                                                          \
    static void test_name(void)

/* By how much a build that is not the release may miss a bound on processor time. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { TEST_SLACK = 50 };
#else
enum { TEST_SLACK = TP_DEBUG ? 10 : 1 };
#endif

/* ---- expectations: EXPECT notes a failure and goes on, MUST ends the test. MUST and SKIP only
 * on the thread that runs the test; EXPECT on any. ---- */

/* The error that EXPECT_OK and its kin print and clear: pass &test_error to the call. */
extern _Thread_local tp_error test_error;

void test_fail(const char *file, int line, const char *fmt, ...) TP_PRINTF(3, 4);
/* Failures of the test so far. */
unsigned test_failures(void);
_Noreturn void test_stop(void);
_Noreturn void test_skip(const char *reason);

#define SKIP(reason) test_skip(reason)

bool test_expect(const char *file, int line, const char *text, bool holds);
#define EXPECT(cond) test_expect(__FILE__, __LINE__, #cond, (cond))
#define MUST(cond) (EXPECT(cond) ? (void)0 : test_stop())

bool test_expect_equal(const char *file, int line, const char *text_a, const char *text_b,
                       unsigned long long a, unsigned long long b);
/* Whole numbers. */
#define EXPECT_EQ(a, b)                                                                        \
    test_expect_equal(__FILE__, __LINE__, #a, #b, (unsigned long long)(a),                     \
                      (unsigned long long)(b))

bool test_expect_status(const char *file, int line, const char *text, tp_status got,
                        tp_status wanted);
void test_error_clear(void);
#define EXPECT_STATUS(call, wanted)                                                            \
    (test_error_clear(), test_expect_status(__FILE__, __LINE__, #call, (call), (wanted)))
#define EXPECT_OK(call) EXPECT_STATUS(call, TP_OK)
#define MUST_OK(call) (EXPECT_OK(call) ? (void)0 : test_stop())

/* Runs `body(arg)` in a forked child; true if the child was ended by `signal`. */
bool test_ends_by_signal(int signal, void (*body)(void *arg), void *arg);
/* True if `body(arg)` runs into a failing assert. Debug builds only. */
bool test_traps(void (*body)(void *arg), void *arg);

/* ---- random tests ------------------------------------------------------------------------ */

/* The seed of this run: TP_SEED, or drawn from the clock. Printed when the test fails. */
uint64_t test_seed(void);
/* The next number of a generator; *state is any number at first. */
uint64_t test_random(uint64_t *state);
/* Below `bound`, which is not 0. */
uint64_t test_random_below(uint64_t *state, uint64_t bound);
/* `normal` times TP_TEST_ROUNDS_FACTOR: fewer under a sanitizer, more in a stress run. */
unsigned test_rounds(unsigned normal);

/* TP_RULES_OFF: the rules that this run does without, to see which tests miss them. */
uint32_t test_rules_off(void);

#endif

#define _POSIX_C_SOURCE 200809L

#include "harness.h"

#include <fnmatch.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { EXIT_SKIPPED = 77, EXIT_NO_SUCH_TEST = 2, SHOWN_FAILURES_MAX = 20 };
enum { JUMP_STOPPED = 1, JUMP_SKIPPED = 2 };

_Thread_local tp_error test_error;

static test_case *first_test;
static test_case **last_link = &first_test;
static const test_case *current;
static jmp_buf leave;
static atomic_uint failures;
static uint64_t seed;

void test_register(test_case *test) {
    *last_link = test;
    last_link = &test->next;
}

void test_fail(const char *file, int line, const char *fmt, ...) {
    if (atomic_fetch_add(&failures, 1) >= SHOWN_FAILURES_MAX) return;
    char text[512];
    va_list args;
    va_start(args, fmt);
    (void)vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    (void)printf("%s:%d: %s: %s\n", file, line, current->name, text);
    (void)fflush(stdout);
}

unsigned test_failures(void) { return atomic_load(&failures); }

void test_stop(void) { longjmp(leave, JUMP_STOPPED); }

void test_skip(const char *reason) {
    (void)printf("skipped %s: %s\n", current->name, reason);
    longjmp(leave, JUMP_SKIPPED);
}

bool test_expect(const char *file, int line, const char *text, bool holds) {
    if (!holds) test_fail(file, line, "%s", text);
    return holds;
}

bool test_expect_equal(const char *file, int line, const char *text_a, const char *text_b,
                       unsigned long long a, unsigned long long b) {
    if (a == b) return true;
    test_fail(file, line, "%s is %llu (%#llx), %s is %llu (%#llx)", text_a, a, a, text_b, b, b);
    return false;
}

bool test_expect_status(const char *file, int line, const char *text, tp_status got,
                        tp_status wanted) {
    if (got == wanted) return true;
    test_fail(file, line, "%s answered %s, not %s: %s (driver code %lld)", text,
              tp_status_name(got), tp_status_name(wanted), test_error.message,
              (long long)test_error.driver_code);
    return false;
}

void test_error_clear(void) { test_error = (tp_error){0}; }

static int child_wait_status(void (*body)(void *arg), void *arg) {
    (void)fflush(stdout);
    const pid_t pid = fork();
    if (pid < 0) return -1;
    if (pid == 0) {
        const struct rlimit no_core = {0, 0};
        (void)setrlimit(RLIMIT_CORE, &no_core);
        static const int signals[] = {SIGSEGV, SIGBUS, SIGILL, SIGTRAP, SIGABRT};
        for (size_t i = 0; i < sizeof signals / sizeof signals[0]; i++) {
            (void)signal(signals[i], SIG_DFL); /* a sanitizer would report and exit instead */
        }
        body(arg);
        _exit(0);
    }
    int status = 0;
    return waitpid(pid, &status, 0) == pid ? status : -1;
}

bool test_ends_by_signal(int signal, void (*body)(void *arg), void *arg) {
    const int status = child_wait_status(body, arg);
    return status != -1 && WIFSIGNALED(status) && WTERMSIG(status) == signal;
}

bool test_traps(void (*body)(void *arg), void *arg) {
    const int status = child_wait_status(body, arg);
    if (status == -1 || !WIFSIGNALED(status)) return false;
    return WTERMSIG(status) == SIGILL || WTERMSIG(status) == SIGTRAP;
}

uint64_t test_seed(void) { return seed; }

uint64_t test_random(uint64_t *state) {
    /* xorshift with a multiplication; 0 is its one fixed point. */
    uint64_t x = *state != 0 ? *state : 0x2545F4914F6CDD1Du;
    x ^= x >> 12;
    x ^= x << 25;
    x ^= x >> 27;
    *state = x;
    return x * 0x2545F4914F6CDD1Du;
}

uint64_t test_random_below(uint64_t *state, uint64_t bound) {
    return (test_random(state) >> 11) % bound;
}

static double env_number(const char *name, double otherwise) {
    const char *text = getenv(name);
    if (text == NULL || *text == '\0') return otherwise;
    char *end = NULL;
    const double value = strtod(text, &end);
    return *end == '\0' && value > 0 ? value : otherwise;
}

unsigned test_rounds(unsigned normal) {
    const double rounds = normal * env_number("TP_TEST_ROUNDS_FACTOR", 1.0);
    return rounds < 1 ? 1 : (unsigned)rounds;
}

uint32_t test_rules_off(void) {
    const char *text = getenv("TP_RULES_OFF");
    return text == NULL ? 0 : (uint32_t)strtoul(text, NULL, 0);
}

static void seed_choose(void) {
    const char *text = getenv("TP_SEED");
    if (text != NULL && *text != '\0') {
        seed = strtoull(text, NULL, 0);
        return;
    }
    struct timespec now;
    (void)clock_gettime(CLOCK_REALTIME, &now);
    seed = (uint64_t)now.tv_sec * 1000003u ^ (uint64_t)now.tv_nsec ^ (uint64_t)getpid() << 32;
}

static bool chosen(const test_case *test, int count, char *const *patterns) {
    if (count == 0) return true;
    for (int i = 0; i < count; i++) {
        if (fnmatch(patterns[i], test->name, 0) == 0) return true;
    }
    return false;
}

/* A plain name, not a pattern, has to name a test. */
static bool names_exist(int count, char *const *names) {
    for (int i = 0; i < count; i++) {
        bool found = strpbrk(names[i], "*?[") != NULL;
        for (const test_case *test = first_test; test != NULL && !found; test = test->next) {
            found = strcmp(test->name, names[i]) == 0;
        }
        if (!found) {
            (void)printf("no test is named %s\n", names[i]);
            return false;
        }
    }
    return true;
}

typedef struct test_totals {
    unsigned passed, failed, skipped;
} test_totals;

static void run_one(const test_case *test, test_totals *totals) {
    current = test;
    atomic_store(&failures, 0);
    test_error_clear();
    (void)alarm((unsigned)env_number("TP_TEST_TIMEOUT_S", 300));
    const int jumped = setjmp(leave);
    if (jumped == 0) test->run();
    (void)alarm(0);
    const unsigned failed = atomic_load(&failures);
    if (failed != 0 || jumped == JUMP_STOPPED) {
        totals->failed++;
        (void)printf("FAILED %s: %u expectations; again with TP_SEED=%llu\n", test->name,
                     failed, (unsigned long long)seed);
    } else if (jumped == JUMP_SKIPPED) {
        totals->skipped++;
    } else {
        totals->passed++;
        if (getenv("TP_TEST_VERBOSE") != NULL) (void)printf("ok %s\n", test->name);
    }
    (void)fflush(stdout);
}

int main(int argc, char **argv) {
    if (argc == 2 && strcmp(argv[1], "--list") == 0) {
        for (const test_case *test = first_test; test != NULL; test = test->next) {
            (void)puts(test->name);
        }
        return 0;
    }
    if (!names_exist(argc - 1, argv + 1)) return EXIT_NO_SUCH_TEST;
    seed_choose();
    test_totals totals = {0, 0, 0};
    for (const test_case *test = first_test; test != NULL; test = test->next) {
        if (chosen(test, argc - 1, argv + 1)) run_one(test, &totals);
    }
    (void)printf("%u passed, %u failed, %u skipped\n", totals.passed, totals.failed,
                 totals.skipped);
    if (totals.failed != 0) return 1;
    return totals.passed == 0 && totals.skipped != 0 ? EXIT_SKIPPED : 0;
}

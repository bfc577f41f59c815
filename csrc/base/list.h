/* list: an intrusive doubly linked list with a sentinel. No allocation, no lock. */
#ifndef TP_BASE_LIST_H
#define TP_BASE_LIST_H

#include <stdbool.h>
#include <stddef.h>

typedef struct tp_link {
    struct tp_link *prev, *next;
} tp_link;

/* The struct of type `type` whose member `member` is the link `ptr`. */
#define TP_CONTAINER(ptr, type, member)                                                        \
    ((type *)(void *)((char *)(ptr) - offsetof(type, member)))

static inline void tp_list_init(tp_link *head) { head->prev = head->next = head; }

static inline bool tp_list_empty(const tp_link *head) { return head->next == head; }

/* A link that is in no list points at itself, so removing it again is harmless. */
static inline bool tp_link_in_list(const tp_link *link) { return link->next != link; }

static inline void tp_list_push_back(tp_link *head, tp_link *link) {
    link->prev = head->prev;
    link->next = head;
    head->prev->next = link;
    head->prev = link;
}

static inline void tp_list_push_front(tp_link *head, tp_link *link) {
    tp_list_push_back(head->next, link);
}

static inline void tp_list_remove(tp_link *link) {
    link->prev->next = link->next;
    link->next->prev = link->prev;
    link->prev = link->next = link;
}

#endif

/* The pool of threads, by sums that it shares out: many after another, from two callers at once, after a pause that
   sends its threads to sleep, and in a forked child, which has none of them. */

#define _DEFAULT_SOURCE

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "matvec.h"
#include "no_fork.h"

enum { MOST = 5 << 18 }; /* words: five pieces of work */

static uint32_t* words;

/* The number of sums that are wrong, of `count` over 1 to MOST words. */
static long wrong_sums(int count) {
  long wrong = 0;
  for (int i = 0; i < count; i++) {
    const uint32_t some = 1 + (uint32_t)i * 77777u % MOST;
    if (gearbx_read_sum(words, some) != some * 3u) wrong++;
  }
  return wrong;
}

static void* sums_of_thread(void* wrong) {
  *(long*)wrong = wrong_sums(50);
  return NULL;
}

static long wrong_in_child(void) {
#ifdef NO_FORK
  return 0;
#endif
  const pid_t child = fork();
  if (child == 0) _exit(wrong_sums(20) != 0);
  int status = 1;
  waitpid(child, &status, 0);
  return status != 0;
}

int main(void) {
  words = malloc(sizeof(uint32_t) * MOST);
  for (int i = 0; i < MOST; i++) words[i] = 3;
  long other = 0, wrong = wrong_sums(50);
  pthread_t thread;
  pthread_create(&thread, NULL, sums_of_thread, &other);
  wrong += wrong_sums(50);
  pthread_join(thread, NULL);
  for (int i = 0; i < 20; i++) {
    usleep(300);
    wrong += wrong_sums(1 + i % 3);
  }
  wrong += wrong_in_child() + wrong_sums(3);
  printf("190 sums, %ld wrong, %d threads\n", wrong + other, gearbx_threads());
  free(words);
  return wrong + other != 0;
}

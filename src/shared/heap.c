/*
 * heap.c
 *		The two heaps of a partition's cells, ordered by the cells' ends.
 *
 * All cells may be in one partition, if one key has them.  So the items are in pages of one size,
 * of which a heap has as many as it needs.  There are enough for all heaps, each with one that is
 * partly used.
 *
 * Locks: the partition's lock protects its table of pages, and the items in them; for all
 * functions with a view the caller holds it, exclusively to change a heap.  The mutex of Pages
 * protects Pages, and the links between free pages.
 */
#include "postgres.h"

#include "storage/spin.h"

#include "shared/heap.h"

#define CHILDREN			8	/* of a heap's item; few levels need few moves */

/* Pages that are in no heap.  The mutex protects all members. */
typedef struct Pages
{
	slock_t		mutex;
	uint32		free;			/* a list, linked by "cell" of the first items; NO_PAGE: empty */
	uint32		used;			/* pages with this number and higher ones were never used */
} Pages;

#define NO_PAGE				PG_UINT32_MAX

/* Sizes and addresses; set once, at start. */
static int	page_bits;			/* a page has 1 << page_bits items */
static uint32 table_size;		/* the most pages of a partition */
static Size tables_size;		/* in bytes, of all partitions */
static Pages *pages;
static uint32 *tables;			/* for each partition the numbers of its pages */
static RlHeapItem *items;

/*
 * Sets the sizes of the heaps of all partitions, and returns their bytes.  Tables and pages that
 * are partly used take the least memory together if a page has the square root of an eighth of the
 * cells.
 */
Size
rl_heaps_size(uint32 ncells, int npartitions)
{
	Size		npages;

	page_bits = 4;
	while (UINT64CONST(8) << 2 * page_bits < ncells)
		page_bits++;
	table_size = (ncells >> page_bits) + 2;
	tables_size = CACHELINEALIGN(mul_size(npartitions, table_size * sizeof(uint32)));
	npages = (ncells >> page_bits) + 2 * (Size) npartitions;
	return add_size(CACHELINEALIGN(sizeof(Pages)) + tables_size,
					mul_size(npages << page_bits, sizeof(RlHeapItem)));
}

/* Sets the addresses in memory of that size, and unless it was found there, makes all heaps empty. */
void
rl_heaps_attach(void *memory, bool found)
{
	pages = memory;
	tables = (uint32 *) ((char *) memory + CACHELINEALIGN(sizeof(Pages)));
	items = (RlHeapItem *) ((char *) tables + tables_size);
	if (found)
		return;
	SpinLockInit(&pages->mutex);
	pages->free = NO_PAGE;
	pages->used = 0;
}

/* Returns the table of a partition's pages. */
uint32 *
rl_heap_pages(int partition)
{
	return tables + (Size) partition * table_size;
}

/*
 * Returns where the number of an item's page is.  In the table, one heap grows from its front, the other from
 * its end.
 */
static uint32 *
page_of(const RlCells *view, int heap, uint32 at)
{
	uint32		n = at >> page_bits;

	return &view->pages[heap == RL_WITHOUT_CHUNKS ? n : table_size - 1 - n];
}

/* Returns an item. */
RlHeapItem *
rl_heap_item(const RlCells *view, int heap, uint32 at)
{
	return &items[((Size) *page_of(view, heap, at) << page_bits) + (at & ((1 << page_bits) - 1))];
}

/* Gives the heap a page if the item at this position, its end, is the first one of a page. */
static void
add_page(RlCells *view, int heap, uint32 at)
{
	uint32		page;

	if ((at & ((1 << page_bits) - 1)) != 0)
		return;
	SpinLockAcquire(&pages->mutex);
	page = pages->free;
	if (page != NO_PAGE)
		pages->free = items[(Size) page << page_bits].cell;
	else
		page = pages->used++;
	SpinLockRelease(&pages->mutex);
	*page_of(view, heap, at) = page;
}

/* Frees that page, whose only item was removed. */
static void
remove_page(RlCells *view, int heap, uint32 at)
{
	uint32		page;

	if ((at & ((1 << page_bits) - 1)) != 0)
		return;
	page = *page_of(view, heap, at);
	SpinLockAcquire(&pages->mutex);
	items[(Size) page << page_bits].cell = pages->free;
	pages->free = page;
	SpinLockRelease(&pages->mutex);
}

static void
put_in_heap(RlCells *view, int heap, uint32 at, RlHeapItem item)
{
	*rl_heap_item(view, heap, at) = item;
	rl_cell_at(view, item.cell)->heap_at = at;
	if (at == 0)
		view->partition->soonest[heap] = item.end;
}

/* Puts an item into the heap: at a free position, or at its place above or below it. */
void
rl_heap_sift(RlCells *view, int heap, uint32 at, RlHeapItem item)
{
	uint32		n = view->partition->n[heap];

	while (at > 0 && rl_heap_item(view, heap, (at - 1) / CHILDREN)->end > item.end)
	{
		put_in_heap(view, heap, at, *rl_heap_item(view, heap, (at - 1) / CHILDREN));
		at = (at - 1) / CHILDREN;
	}
	for (;;)
	{
		uint32		first = CHILDREN * at + 1;
		uint32		least = first;

		for (uint32 child = first + 1; child < Min(first + CHILDREN, n); child++)
			if (rl_heap_item(view, heap, child)->end < rl_heap_item(view, heap, least)->end)
				least = child;
		if (least >= n || rl_heap_item(view, heap, least)->end >= item.end)
			break;
		put_in_heap(view, heap, at, *rl_heap_item(view, heap, least));
		at = least;
	}
	put_in_heap(view, heap, at, item);
}

/* Adds a cell, whose end is set. */
void
rl_heap_add(RlCells *view, int heap, uint32 c)
{
	RlCell	   *cell = rl_cell_at(view, c);

	cell->heap = heap;
	add_page(view, heap, view->partition->n[heap]++);
	rl_heap_sift(view, heap, view->partition->n[heap] - 1, (RlHeapItem) {cell->end, c});
}

/* Removes a cell. */
void
rl_heap_remove(RlCells *view, uint32 c)
{
	RlCell	   *cell = rl_cell_at(view, c);
	int			heap = cell->heap;
	uint32		n = --view->partition->n[heap];
	RlHeapItem	last = *rl_heap_item(view, heap, n);

	if (last.cell != c)
		rl_heap_sift(view, heap, cell->heap_at, last);
	else if (n == 0)
		view->partition->soonest[heap] = PG_INT64_MAX;
	remove_page(view, heap, n);
}

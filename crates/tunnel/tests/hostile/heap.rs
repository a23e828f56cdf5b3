//! Counts the memory that one end of a world holds: allocations and frees inside [`counted`], each test in
//! its thread.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
};

/// The overhead of an allocator for each block (bytes): the header of glibc's malloc, and half of its
/// rounding to 16.
const BLOCK_OVERHEAD: isize = 16;

thread_local! {
    static IS_COUNTING: Cell<bool> = const { Cell::new(false) };
    static HELD: Cell<isize> = const { Cell::new(0) };
}

struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn count(bytes: isize) {
    if IS_COUNTING.get() {
        HELD.set(HELD.get() + bytes);
    }
}

// SAFETY: every call is passed on to the system's allocator unchanged; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize + BLOCK_OVERHEAD);
        // SAFETY: the caller's promises are those of this function.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        count(-(layout.size() as isize + BLOCK_OVERHEAD));
        // SAFETY: as above; `block` came from `alloc` or `realloc` here, so from the system's allocator.
        unsafe { System.dealloc(block, layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        count(new_size as isize - layout.size() as isize);
        // SAFETY: as above.
        unsafe { System.realloc(block, layout, new_size) }
    }
}

/// Runs `work` of the end whose memory is counted. Nothing that is allocated in it may be freed outside, and
/// the reverse.
pub fn counted<T>(work: impl FnOnce() -> T) -> T {
    let before = IS_COUNTING.replace(true);
    let done = work();
    IS_COUNTING.set(before);
    done
}

/// Runs `work` of another end from inside [`counted`].
pub fn uncounted<T>(work: impl FnOnce() -> T) -> T {
    let before = IS_COUNTING.replace(false);
    let done = work();
    IS_COUNTING.set(before);
    done
}

/// Bytes that the counted end holds.
pub fn held() -> usize {
    usize::try_from(HELD.get()).unwrap_or_default()
}

#[test]
fn what_is_allocated_and_freed_is_counted() {
    let before = held();
    let kept = counted(|| vec![0u8; 1000]);
    assert!((1000..1100).contains(&(held() - before)));
    let grown = counted(|| {
        let mut grown = kept;
        grown.resize(5000, 1);
        grown
    });
    assert!((5000..5200).contains(&(held() - before)));
    drop(uncounted(|| vec![0u8; 1000]));
    counted(|| drop(grown));
    assert_eq!(held(), before);
}

//! Tests that end or stop parts of the bed, one after the other. By their name they come first, so that the others
//! run side by side without a break.

mod kills;
mod outages;

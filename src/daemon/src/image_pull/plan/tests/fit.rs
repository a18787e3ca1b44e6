use std::collections::BTreeSet;

use proptest::prelude::*;

use super::super::fit::{bare, fit, stored};
use super::*;
use kruise_api::node_image::{ImageStatus, MOST_STATUS, NodeImageStatus};

/// Whom a tag is pulled for, and what is said of it.
type Said = (BTreeSet<&'static str>, String);

fn status_of(said: &[Said]) -> NodeImageStatus {
    let mut status = NodeImageStatus::default();
    for (n, (_, text)) in said.iter().enumerate() {
        let image = status
            .image_statuses
            .entry(format!("image-{}", n % 3))
            .or_insert_with(|| ImageStatus { tags: Vec::new() });
        image.tags.push(ImageTagStatus {
            tag: n.to_string(),
            phase: ImagePullPhase::Failed,
            progress: 0,
            start_time: None,
            completion_time: None,
            version: 7,
            image_id: None,
            message: Some(text.clone()),
        });
    }
    status
}

fn fitted(status: NodeImageStatus, said: &[Said], most: usize) -> NodeImageStatus {
    let namespaces = |key: &TagKey| said[key.tag.parse::<usize>().unwrap()].0.clone();
    fit(status, namespaces, most)
}

/// The messages in the order of `said`.
fn messages(status: &NodeImageStatus) -> BTreeMap<usize, Option<String>> {
    let tags = status.image_statuses.values().flat_map(|image| &image.tags);
    tags.map(|tag| (tag.tag.parse().unwrap(), tag.message.clone()))
        .collect()
}

#[test]
fn the_status_has_room_for_others_however_much_one_namespace_says() {
    let mut asks: BTreeMap<_, _> = (0..1500)
        .map(|n| (key(&format!("evil-{n}")), ask_in("evil", "a")))
        .collect();
    asks.insert(key("good"), ask_in("good", "b"));
    let mut board = Board::default();
    board.desire(&asks, &BTreeMap::new());
    let all = Limits {
        max_parallel: 1501,
        max_per_namespace: 1501,
        runtime: true,
    };
    for (key, run) in go(&mut board, &all, at(0)) {
        let words = if key.tag == "good" {
            "good luck ".repeat(100)
        } else {
            "<".repeat(600)
        };
        let again = Again::Never;
        board.ended(&key, run, Ended::Failed { words, again }, at(1));
    }
    let status = status::compose(&board, &LIMITS);
    assert!(stored(&status) <= MOST_STATUS, "{}", stored(&status));
    assert_eq!((status.failed, status.desired), (1501, 1501));
    let told = status::by_tag(&status);
    assert_eq!(told[&key("good")].message, Some("good luck ".repeat(100)));
    let evil = told[&key("evil-7")].message.clone().unwrap();
    assert!(evil.starts_with("<<<<") && evil.ends_with('…'), "{evil}");
    assert!(told[&key("evil-7")].completion_time.is_some());
}

#[test]
fn what_one_adds_to_the_tag_of_another_cuts_nothing_of_that() {
    let large = "x".repeat(3000);
    let mut said: Vec<Said> = vec![(["evil"].into(), large.clone()); 20];
    said.push((["evil", "good"].into(), large.clone()));
    let status = fitted(status_of(&said), &said, 20_000);
    assert_eq!(messages(&status)[&20], Some(large));
    let evil = messages(&status)[&0].clone().unwrap();
    assert_eq!(evil.len(), 512 - r#","message":"""#.len());
}

fn any_said() -> impl Strategy<Value = Vec<Said>> {
    let namespaces = prop::collection::btree_set(prop::sample::select(vec!["a", "b", "c"]), 0..3);
    let text = ("[ab<é\"\n€😀\u{2028}]{0,5}", 0..300_usize).prop_map(|(text, times)| text.repeat(times));
    prop::collection::vec((namespaces, text), 0..30)
}

proptest! {
    /// Whatever is said: the status has its size, all but messages stays, and these are whole, cut or gone.
    #[test]
    fn a_status_that_is_too_large_is_cut_to_size(said in any_said(), most in 0_usize..60_000) {
        let before = status_of(&said);
        let after = fitted(before.clone(), &said, most);
        prop_assert!(stored(&after) <= most.max(stored(&bare(before.clone()))));
        prop_assert_eq!(&fitted(before.clone(), &said, most), &after);
        prop_assert_eq!(&fitted(after.clone(), &said, most), &after);
        prop_assert_eq!(bare(after.clone()), bare(before.clone()));
        let (old, new) = (messages(&before), messages(&after));
        if stored(&before) <= most {
            prop_assert_eq!(&new, &old);
        }
        for (n, text) in new {
            let whole = old[&n].as_deref().unwrap();
            let begin = text.as_deref().map(|text| text.strip_suffix('…').unwrap_or(text));
            prop_assert!(begin.is_none_or(|begin| whole.starts_with(begin)));
        }
    }

    /// A namespace that needs no more than its part of the room has all its messages whole.
    #[test]
    fn a_namespace_under_its_share_keeps_its_messages(said in any_said(), most in 0_usize..60_000) {
        let before = status_of(&said);
        let room = most.saturating_sub(stored(&bare(before.clone())));
        let after = messages(&fitted(before.clone(), &said, most));
        let present: BTreeSet<&str> = said.iter().flat_map(|(of, _)| of.iter().copied()).collect();
        // Tags of nobody have a part, too.
        let parts = present.len() + usize::from(said.iter().any(|(of, _)| of.is_empty()));
        for namespace in present {
            let mine: Vec<usize> = (0..said.len()).filter(|n| said[*n].0.contains(namespace)).collect();
            let only: Vec<Said> = mine.iter().map(|n| said[*n].clone()).collect();
            let needs = stored(&status_of(&only)) - stored(&bare(status_of(&only)));
            if needs <= room / parts {
                for n in mine {
                    prop_assert_eq!(after[&n].as_deref(), Some(said[n].1.as_str()));
                }
            }
        }
    }
}

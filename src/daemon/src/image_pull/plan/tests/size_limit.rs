use std::collections::BTreeSet;

use proptest::prelude::*;

use super::super::size_limit::{fit_to_size, stored_bytes, without_messages};
use super::*;
use kruise_api::node_image::{ImageStatus, MAX_STATUS_BYTES, NodeImageStatus};

/// The namespaces that a tag is pulled for, and its message.
type TagMessages = (BTreeSet<&'static str>, String);

fn status_with(messages: &[TagMessages]) -> NodeImageStatus {
    let mut status = NodeImageStatus::default();
    for (n, (_, text)) in messages.iter().enumerate() {
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
            bytes: None,
        });
    }
    status
}

fn fit_messages(status: NodeImageStatus, messages: &[TagMessages], max_bytes: usize) -> NodeImageStatus {
    let namespaces = |key: &TagKey| messages[key.tag.parse::<usize>().unwrap()].0.clone();
    fit_to_size(status, namespaces, max_bytes)
}

/// The messages in their original order.
fn messages(status: &NodeImageStatus) -> BTreeMap<usize, Option<String>> {
    let tags = status.image_statuses.values().flat_map(|image| &image.tags);
    tags.map(|tag| (tag.tag.parse().unwrap(), tag.message.clone()))
        .collect()
}

#[test]
fn long_messages_leave_room_for_other_namespaces() {
    let mut specs: BTreeMap<_, _> = (0..1500)
        .map(|n| (key(&format!("evil-{n}")), spec_in("evil", "a")))
        .collect();
    specs.insert(key("good"), spec_in("good", "b"));
    let mut board = TaskBoard::default();
    board.sync_spec(&specs, &BTreeMap::new());
    let all = PullLimits {
        max_parallel: 1501,
        max_per_namespace: 1501,
        max_per_registry: 1501,
        runtime_ready: true,
    };
    for (key, run) in start_planned(&mut board, &all, at(0)) {
        let message = if key.tag == "good" {
            "good luck ".repeat(100)
        } else {
            "<".repeat(600)
        };
        let retry = AttemptRetry::Never;
        board.on_attempt_ended(&key, run, AttemptResult::Failed { message, retry }, at(1));
    }
    let status = status::compose(&board, &LIMITS);
    assert!(
        stored_bytes(&status) <= MAX_STATUS_BYTES,
        "{}",
        stored_bytes(&status)
    );
    assert_eq!((status.failed, status.desired), (1501, 1501));
    let tags = status::by_tag(&status);
    assert_eq!(tags[&key("good")].message, Some("good luck ".repeat(100)));
    let evil = tags[&key("evil-7")].message.clone().unwrap();
    assert!(evil.starts_with("<<<<") && evil.ends_with('…'), "{evil}");
    assert!(tags[&key("evil-7")].completion_time.is_some());
}

#[test]
fn shared_tag_message_is_not_cut_for_its_other_owner() {
    let large = "x".repeat(3000);
    let mut tag_messages: Vec<TagMessages> = vec![(["evil"].into(), large.clone()); 20];
    tag_messages.push((["evil", "good"].into(), large.clone()));
    let status = fit_messages(status_with(&tag_messages), &tag_messages, 20_000);
    assert_eq!(messages(&status)[&20], Some(large));
    let evil = messages(&status)[&0].clone().unwrap();
    assert_eq!(evil.len(), 512 - r#","message":"""#.len());
}

fn any_messages() -> impl Strategy<Value = Vec<TagMessages>> {
    let namespaces = prop::collection::btree_set(prop::sample::select(vec!["a", "b", "c"]), 0..3);
    let text = ("[ab<é\"\n€😀\u{2028}]{0,5}", 0..300_usize).prop_map(|(text, times)| text.repeat(times));
    prop::collection::vec((namespaces, text), 0..30)
}

proptest! {
    /// For any messages: the status has at most its size, everything but messages is kept, and messages are whole, cut
    /// or removed.
    #[test]
    fn oversized_node_image_status_is_cut_to_size(said in any_messages(), most in 0_usize..60_000) {
        let before = status_with(&said);
        let after = fit_messages(before.clone(), &said, most);
        prop_assert!(stored_bytes(&after) <= most.max(stored_bytes(&without_messages(before.clone()))));
        prop_assert_eq!(&fit_messages(before.clone(), &said, most), &after);
        prop_assert_eq!(&fit_messages(after.clone(), &said, most), &after);
        prop_assert_eq!(without_messages(after.clone()), without_messages(before.clone()));
        let (old, new) = (messages(&before), messages(&after));
        if stored_bytes(&before) <= most {
            prop_assert_eq!(&new, &old);
        }
        for (n, text) in new {
            let whole = old[&n].as_deref().unwrap();
            let begin = text.as_deref().map(|text| text.strip_suffix('…').unwrap_or(text));
            prop_assert!(begin.is_none_or(|begin| whole.starts_with(begin)));
        }
    }

    /// A namespace that needs no more than its share of the budget keeps all its messages whole.
    #[test]
    fn namespace_under_its_share_keeps_its_messages(said in any_messages(), most in 0_usize..60_000) {
        let before = status_with(&said);
        let room = most.saturating_sub(stored_bytes(&without_messages(before.clone())));
        let after = messages(&fit_messages(before.clone(), &said, most));
        let present: BTreeSet<&str> = said.iter().flat_map(|(of, _)| of.iter().copied()).collect();
        // Tags without a namespace have a share, too.
        let parts = present.len() + usize::from(said.iter().any(|(of, _)| of.is_empty()));
        for namespace in present {
            let mine: Vec<usize> = (0..said.len()).filter(|n| said[*n].0.contains(namespace)).collect();
            let only: Vec<TagMessages> = mine.iter().map(|n| said[*n].clone()).collect();
            let needs = stored_bytes(&status_with(&only)) - stored_bytes(&without_messages(status_with(&only)));
            if needs <= room / parts {
                for n in mine {
                    prop_assert_eq!(after[&n].as_deref(), Some(said[n].1.as_str()));
                }
            }
        }
    }
}
